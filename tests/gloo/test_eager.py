"""Models that cannot be captured, on several ranks: equal to one process, whatever a rank has no gradient of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.eager import everything
from tests.gloo.ranks import run_worlds


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, {1: (), 2: (), 3: ()})


def test_steps_are_those_of_one_process(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for n, ranks in worlds.items():
        for found in ranks:
            wrong = {k: off for k, off in found["steps"].items() if off > (0.05 if "bf16" in k else 1e-12)}
            assert found["steps"] and wrong == {}, (n, wrong)


def test_a_drop_in_leaves_the_gradients_of_one_process(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(max(found["module"]) <= 1e-12 for ranks in worlds.values() for found in ranks)


def test_a_checkpoint_of_one_plan_goes_on_under_another(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["resumed"] <= 1e-14 for ranks in worlds.values() for found in ranks)


def test_a_model_that_writes_to_its_parameters_is_refused_where_ranks_would_drift_apart(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    assert worlds[1][0]["refused"] == ""
    for found in (*worlds[2], *worlds[3]):
        assert "writes to its parameter 'table.weight'" in found["refused"]
        assert "drift apart" in found["refused"]


def test_ranks_may_communicate_in_the_forward_pass_and_hold_other_buffers_until_they_take_rank_0_s(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for found in (found["meets"] for ranks in worlds.values() for found in ranks):
        assert found["off"] <= 1e-12 and found["queue"] == 0 and found["cache"]


def test_one_of_two_models_may_be_frozen_while_the_other_trains(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["adversarial"] <= 1e-12 for ranks in worlds.values() for found in ranks)
