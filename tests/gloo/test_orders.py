"""Ranks whose forward passes go through a model in different orders, which DDP trains, train it right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.orders import everything
from tests.gloo.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def test_they_are_equal_to_one_process(ranks: list[dict[str, Any]]) -> None:
    off = {(kind, how): one["off"] for found in ranks for kind, of in found.items() for how, one in of.items()}
    assert len(off) == 4 and max(off.values()) <= 1e-13, off


def test_they_run_eagerly_where_collectives_would_have_another_order(ranks: list[dict[str, Any]]) -> None:
    for one in ranks[0]["Parts"].values():
        (said,) = one["said"]
        assert "the model runs eagerly" in said and "sort it" in said


def test_what_has_no_parameters_may_have_any_order_in_a_captured_model(ranks: list[dict[str, Any]]) -> None:
    """A Gemma 4 was refused by chance: its rotary embeddings are computed in the order of a set of words."""
    assert [one["said"] for found in ranks for one in found["Powers"].values()] == [[]] * 4
