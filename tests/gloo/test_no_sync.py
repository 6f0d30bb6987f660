"""Gradients that the drop-in module keeps back lie in `grad`, and can be changed there, as with DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.no_sync import everything
from tests.gloo.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(2, everything)


def test_gradients_are_those_of_ddp_between_all_passes(ranks: list[Any]) -> None:
    assert {name: x for apart, _, _ in ranks for name, x in apart.items() if not x <= 1e-12} == {}


def test_changes_between_batches_that_count_differently_are_refused(ranks: list[Any]) -> None:
    assert all("changed between backward passes within no_sync()" in text for _, said, _ in ranks for text in said)


def test_gradients_that_come_another_way_are_said_or_synchronized(ranks: list[Any]) -> None:
    for rank, (_, _, (alone, beside, eager_alone, eager_beside)) in enumerate(ranks):
        assert alone == eager_alone == [[], 0.0]
        assert len(beside[0]) == 1 and "that the module has not computed" in beside[0][0]
        assert (beside[1] > 0) == (rank > 0)
        assert eager_beside[1] == 0
