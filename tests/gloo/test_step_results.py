"""Outputs and gradient norms that a step hands back: those of one process, under every kind of plan."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import run_worlds
from tests.gloo.step_results import everything
from tests.tiers import sizes


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, dict.fromkeys(sizes(2, also=(1, 3)), ()))


def test_outputs_and_norms_are_those_of_one_process_before_the_update(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for n, ranks in worlds.items():
        for found in ranks:
            wrong = {name: worst for name, worst in found["steps"].items() if max(worst) > 1e-10}
            assert found["steps"] and wrong == {}, (n, wrong)


def test_an_output_keeps_its_structure_and_is_not_written_over(worlds: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["whole"] <= 1e-12 for ranks in worlds.values() for found in ranks)


def test_what_no_rank_has_and_what_not_all_ask_for_is_refused_by_name(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for found in worlds[2]:
        no_output, norm = found["refused"]
        assert "no rank computes all of the model's output" in no_output and "outputs=True" in no_output
        assert "program.step(grad_norm=True)" in norm and "program.step()" in norm
