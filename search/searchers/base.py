"""What a searcher is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from autopar.search.base import Candidate
from autopar.search.evaluate import Evaluator


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


def starts(seeds: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best of the seeds, each of another time: seeds of the same time are mostly one plan under two names."""
    found: list[Candidate] = []
    for candidate in sorted(seeds, key=lambda c: c.order):
        if all(candidate.order != other.order for other in found):
            found.append(candidate)
    return found[:count]
