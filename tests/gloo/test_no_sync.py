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
    assert {name: x for apart, _ in ranks for name, x in apart.items() if not x <= 1e-12} == {}


def test_changes_between_batches_that_count_differently_are_refused(ranks: list[Any]) -> None:
    assert all("changed between backward passes within no_sync()" in text for _, said in ranks for text in said)
