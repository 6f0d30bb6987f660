"""Losses of several terms with counts of their own: as in one process, on ranks with uneven counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import run_worlds
from tests.gloo.terms import everything
from tests.tiers import sizes

Worlds = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return run_worlds(everything, dict.fromkeys(sizes(2, also=(1, 3)), ()))


def test_each_term_is_weighted_by_its_own_count(worlds: Worlds) -> None:
    wrong = {
        (n, k): d for n, ranks in worlds.items() for found in ranks for k, d in found["terms"].items() if d > 1e-12
    }
    assert wrong == {}


def test_terms_that_do_not_fit_their_counts_are_refused(worlds: Worlds) -> None:
    other_name, other_number, no_number, negative, one = worlds[2][0]["refused"]
    assert (
        "weight= counts the terms ['sample', 'tokens'], but the loss is a dict of ['samples', 'tokens']" in other_name
    )
    assert "weight= counts 3 terms, but the loss is a dict" in other_number
    assert "weight= returned a str, expected a number, or a dict or tuple" in no_number
    assert "weight= returned -1.0" in negative
    assert "must be one scalar, got 2 output(s)" in one and "weight= with a count for each" in one
