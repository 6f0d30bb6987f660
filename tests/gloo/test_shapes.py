"""Ranks whose batches have different lengths in one step: as in one process, with few captures."""

from __future__ import annotations

import pytest

from tests.gloo import shapes
from tests.gloo.ranks import run_ranks


@pytest.mark.parametrize("plan", shapes.PLANS)
def test_a_step_is_that_of_one_process(plan: str) -> None:
    for far, captures in run_ranks(2, shapes.steps, plan):
        assert far < 1e-10 and captures <= 3


def test_drop_in() -> None:
    for far, captures in run_ranks(2, shapes.drop_in):
        assert far < 1e-10 and captures <= 3


def test_a_capture_that_would_send_otherwise_is_not_used() -> None:
    for rank, (far, captures) in enumerate(run_ranks(2, shapes.another_order)):
        assert far < 1e-10 and captures == (4, 5)[rank]


def test_under_autocast_steps_have_an_order_of_their_own() -> None:
    assert all(orders == 2 and far < 1e-3 for orders, far in run_ranks(2, shapes.autocast_that_comes_and_goes))
