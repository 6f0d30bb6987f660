"""Which ranks compute different things: all ranks see the same, also those that are not among them."""

from __future__ import annotations

import pytest

from autopar.runtime.job.same_step import Described, unlike_ranks


@pytest.mark.parametrize(
    ("each", "found"),
    [
        (["4 a", "4 a", "3 b"], [None, None, None]),
        (["4 a", "1 b", "4 c"], [(0, 2), (0, 2), (2, 0)]),  # rank 1 waited for the others, which had raised
        (["4 a", "4 c", "4 a", "1 b"], [(0, 1), (1, 0), (2, 1), (0, 1)]),
    ],
)
def test_a_rank_of_another_shape_hears_of_two_that_differ(each: list[str], found: list[tuple[int, int] | None]) -> None:
    everyone = [Described([one[0]], one[2:], [], [], "") for one in each]
    assert [unlike_ranks(everyone, rank) for rank in range(len(each))] == found
