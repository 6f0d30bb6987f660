"""What an operation declares of traffic and memory is held to what it does; one that does not end is named."""

from __future__ import annotations

import sys
import threading

from autopar.testing import check_strategy
from autopar.testing.deadline import place
from tests.extension import declared
from tests.gloo.ranks import run_ranks
from tests.tiers import thorough

DEADLINE_S = 10.0


def test_an_operation_that_understates_what_it_takes_is_found() -> None:
    n, elements = 2, declared.WIDTH**2 + declared.WIDTH
    for rank, found in enumerate(run_ranks(n, declared.differences)):
        assert found["traffic of recursive_doubling"] == [] == found["memory of recursive_doubling"], rank
        assert found["traffic of understated_doubling"] == [
            f"'understated' of {4 * elements} bytes: rank 0 sends {2 * elements} bytes by its phases, "
            f"{4 * elements} by its rank_bytes"
        ]
        assert found["memory of understated_doubling"] == [
            f"'understated' takes {4 * elements} bytes at a time, and declares 0 that it allocates and 0 in passing"
        ]


def test_what_gloo_receives_into_and_wide_sums_are_declared() -> None:
    for rank, found in enumerate(run_ranks(4, declared.of_autopars_own)):
        assert not any(found.values()), (rank, found)


@thorough
def test_an_operation_that_does_not_end_is_named() -> None:
    found = check_strategy(declared.EndlessDoubling, (2,), deadline_s=DEADLINE_S)
    (broken,) = found.broken
    assert f"did not end within {DEADLINE_S:g} s: it " in broken.said and "'endless' of group " in broken.said, broken
    assert found.notes[0] == f"nothing was looked at behind what did not end within {DEADLINE_S:g} s"


def test_what_runs_no_operation_is_found_by_its_line() -> None:
    may_end = threading.Event()
    waiting = threading.Thread(target=may_end.wait)
    waiting.start()
    assert waiting.ident is not None
    assert "is at " in place(sys._current_frames()[waiting.ident])
    may_end.set()
    waiting.join()
    assert place(None) == "has ended"
