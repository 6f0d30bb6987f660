"""Batches of captured programs that cannot be captured: run eagerly, on whichever ranks they come to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import run_worlds
from tests.gloo.stand_ins import everything
from tests.tiers import sizes


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, dict.fromkeys(sizes(2, also=(1,)), ()))


@pytest.mark.parametrize("what", ["steps", "kinds", "module"])
def test_they_train_as_one_process_does(worlds: dict[int, list[dict[str, Any]]], what: str) -> None:
    off = {(n, k): v[0] for n, ranks in worlds.items() for found in ranks for k, v in found[what].items()}
    assert off and {k: v for k, v in off.items() if v > 1e-12} == {}


def test_it_is_said_once_with_the_line(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for found in (found for ranks in worlds.values() for found in ranks):
        for what in ("steps", "kinds", "module"):
            for key, (_, (*_, said)) in found[what].items():
                reason = "has changed before each" if key == "changes" else "a branch depends on a tensor's value"
                assert reason in said or key == "changes", (key, said)
                assert "stand_ins.py" in said and "So the model runs eagerly on such batches" in said
        assert all(len(said) == 1 for _, said in [*found["steps"].values(), *found["kinds"].values()])


def test_one_backward_pass_may_go_through_a_graph_and_autograd(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(worst < 1e-12 for ranks in worlds.values() for found in ranks for worst in found["one pass"])


def test_what_lies_in_grad_before_stays_there(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["added up"] < 1e-12 for ranks in worlds.values() for found in ranks)


def test_one_that_is_kept_back_may_not(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for both, *_ in (said for _, said in worlds[2][0]["module"].values()):
        assert "call backward() for each" in both


def test_plans_that_need_the_graph_refuse_with_the_remedy(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for found in worlds[2]:
        for strategy, why in found["refused"].items():
            assert why.startswith("CaptureError") and "stand_ins.py" in why and "capture='never'" in why, strategy
        assert "rows of '" in found["refused"]["sharded_parameters"]
        assert "'table.weight' cannot use sparse_rows" in found["refused"]["sparse_rows"]


def test_what_counts_as_nothing_adds_nothing_but_where_nothing_counts_anywhere(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    assert all(off < 1e-12 for ranks in worlds.values() for found in ranks for off in found["uncounted"].values())
