"""What a searcher is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from autopar.search.base import Candidate
from autopar.search.evaluate import Evaluator

STALE = 400
"""Tries without a new plan after which a searcher stops: where a space is small, each of its plans comes soon.
[Empirical: 50 small random jobs came to the same plans with 2,000, in 1.3 times the time]"""


class Searcher(ABC):
    """Looks for a good plan. Subclass it in a file of its own.

    `search` is given seeds that are priced already, and an evaluator that prices groups, remembers what it priced and
    says when the budget is spent. It is anytime: the evaluator knows the best so far whenever it stops. The same
    `seed` and the same budget of evaluations give the same result.
    """

    @abstractmethod
    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        """Prices plans through `evaluate` until it is spent, or until nothing better is in sight. The evaluator keeps
        what was priced; the caller chooses from that."""


def tries(evaluate: Evaluator, share: float = 1.0) -> Iterator[None]:
    """One more try, again and again, until this part of the budget is used up, or until as many tries in a row as
    `STALE` have priced nothing new: then there is hardly anything left that could be."""
    stale = 0
    while evaluate.used < share and stale < STALE:
        known = evaluate.priced
        yield
        stale = 0 if evaluate.priced > known else stale + 1


def starts(seeds: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best of the seeds, each of another time: seeds of the same time are mostly one plan under two names."""
    found: list[Candidate] = []
    for candidate in sorted(seeds, key=lambda c: c.order):
        if all(candidate.order != other.order for other in found):
            found.append(candidate)
    return found[:count]
