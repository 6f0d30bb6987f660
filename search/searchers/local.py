"""Local improvement: from the best seeds, all groups' strategies at once where a bound shows promise; then random
moves, kept where they are better; at the end, as few groups as a tie allows.

A stochastic hill climb with a few starts. It is anytime and, for a budget of evaluations, deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.search.base import SEARCHED, TIE, Candidate
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Neighbourhood, merged
from autopar.search.searchers.base import Searcher, starts, tries
from autopar.search.searchers.recombine import Recombination

SIMPLIFY_SHARE = 0.15
"""Part of the budget that is kept for merging groups at the end."""


class LocalSearch(Searcher):
    """Improves the best few seeds step by step."""

    def __init__(
        self, starts: int = 3, patience: int = 100, share: float = 1 - SIMPLIFY_SHARE, in_all: float = 1.0
    ) -> None:
        self.starts = starts
        self.patience = patience
        """Plans in a row without improvement after which it stops."""
        self.share, self.in_all = share, in_all
        """Parts of the budget that may be used up when it begins to merge groups, and when it stops."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        if not seeds:
            return
        draw = random.Random(seed)
        near = Neighbourhood(evaluate.problem)
        current = self._recombined(starts(seeds, self.starts), near, evaluate, draw)
        idle = 0
        for _ in tries(evaluate, self.share):
            if idle >= self.patience:
                break
            # Half of the moves go to the best plan, the others to any, so that no start is given up too soon.
            best = min(range(len(current)), key=lambda k: current[k].order)
            i = best if draw.random() < 0.5 else draw.randrange(len(current))
            groups = near.neighbour(current[i].groups, draw)
            candidate = None if groups is None else evaluate(SEARCHED, groups)
            if candidate is None:
                continue
            idle += 1
            if candidate.order < current[i].order:
                if candidate.order < current[best].order:
                    idle = 0
                current[i] = candidate
        simplify(min(current, key=lambda c: c.order), near, evaluate, self.in_all)

    def _recombined(
        self, starts: list[Candidate], near: Neighbourhood, evaluate: Evaluator, draw: random.Random
    ) -> list[Candidate]:
        """The starts, recombined where the cost model prices single groups."""
        pricer = evaluate.problem.pricer
        if pricer is None:
            return starts
        recombination = Recombination(evaluate, near, pricer)
        return [c if evaluate.spent else recombination.improve(c, draw) for c in starts]


def simplify(best: Candidate, near: Neighbourhood, evaluate: Evaluator, share: float = 1.0) -> Candidate:
    """Merges neighbours for as long as the plan stays within a tie of the best and no slower than the seeds, and until
    this share of the budget is used up; returns the simplest plan that came of it."""
    overflow, seed_s, _ = evaluate.best_seed.order if evaluate.best_seed else best.order
    limit = min(best.step_time_s * (1 + TIE), seed_s) if best.overflow_bytes <= overflow else best.step_time_s
    i = 0
    while i < len(best.groups) - 1 and evaluate.used < share:
        groups = merged(best.groups, i, near.table)
        candidate = None if groups is None else evaluate(SEARCHED, groups)
        if candidate and candidate.step_time_s <= limit and candidate.overflow_bytes <= best.overflow_bytes:
            best = candidate
        else:
            i += 1
    return best
