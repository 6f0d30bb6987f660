"""Compiled compute on two ranks: whatever the plan, the same collectives in the same order, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.compute import PLANS, compiled_and_as_they_are
from tests.gloo.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, compiled_and_as_they_are)


@pytest.mark.parametrize("plan", PLANS)
def test_equals_the_program_as_it_is(ranks: list[dict[str, Any]], plan: str) -> None:
    for found in (r[plan] for r in ranks):
        assert found["distance"] < 1e-12
        assert found["same"] and found["sent"] >= 2 * found["groups"]


def test_some_plans_have_several_groups(ranks: list[dict[str, Any]]) -> None:
    assert max(found["groups"] for found in ranks[0].values()) >= 10
