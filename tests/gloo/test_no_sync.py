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
    assert {name: x for apart, *_ in ranks for name, x in apart.items() if not x <= 1e-12} == {}


def test_changes_between_batches_that_count_differently_are_refused(ranks: list[Any]) -> None:
    assert all("changed between backward passes within no_sync()" in text for _, said, *_ in ranks for text in said)


def test_gradients_that_come_another_way_are_synchronized(ranks: list[Any]) -> None:
    assert all(penalties == [[[], 0.0]] * 4 for _, _, penalties, *_ in ranks)


def test_gradients_that_come_another_way_are_said_where_they_are_taken_too_early(ranks: list[Any]) -> None:
    for _, _, _, (grad, hook, clip, around), _ in ranks:
        assert len(grad) == 1 and "torch.autograd.grad takes this rank's own" in grad[0]
        assert len(hook) == 1 and "'last.weight'" in hook[0] and "a post-accumulate hook was given" in hook[0]
        assert len(clip) == 1 and "clip_grad_norm clips the module's gradients without it" in clip[0]
        assert len(around) == 1 and "'last.weight' gets a gradient from elsewhere after the module's" in around[0]


def test_gradients_that_come_another_way_first_on_one_rank_late_are_refused(ranks: list[Any]) -> None:
    one, other = (rank[-1] for rank in ranks)
    assert other.startswith("CaptureError") and "On another rank, there is none" in other
    assert one.startswith("CollectiveError") and "rank 1" in one
