"""What users do to the optimizer between steps, on several ranks: as in one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import run_ranks
from tests.gloo.users_optimizer import everything


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def test_what_users_do_is_done(ranks: list[dict[str, Any]]) -> None:
    assert {(rank, case): off for rank, r in enumerate(ranks) for case, off in r["off"].items() if off > 1e-12} == {}


def test_state_that_no_rank_has_whole_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["refused"]) == 2
        assert all("is spread over the ranks, or cut into parts" in text for text in found["refused"])
