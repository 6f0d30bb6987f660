"""Buffers are alike on all ranks where the loss depends on them, whatever graphs ranks run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo import buffers
from tests.gloo.ranks import run_worlds


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(buffers.everything, {2: (), 3: ()})


def test_ranks_have_the_same_whichever_of_them_each_has_written(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for ranks in worlds.values():
        for how in ("step", "micro-batches", "drop-in"):
            assert all(found[how] == ranks[0][how] for found in ranks), how
        assert all(any(one) for one in ranks[0]["step"])


def test_constants_stay_as_they_are(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """And replicas that are alike, where they are averaged."""
    assert all(found["constants"] for ranks in worlds.values() for found in ranks)
    assert all(found["averages"] == 0 for ranks in worlds.values() for found in ranks)


def test_what_was_written_and_is_read_later_is_said_and_alike_from_then_on(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for ranks in worlds.values():
        assert all(found["read late"][0] == ranks[0]["read late"][0] for found in ranks)
        assert len(ranks[0]["read late"][1]) == 1


def test_a_state_that_one_rank_alone_was_given_is_refused_on_all(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for ranks in worlds.values():
        assert all("rank 0 and on rank 1 is not the same" in found["other states"] for found in ranks)
