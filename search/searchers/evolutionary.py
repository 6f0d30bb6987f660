"""An evolutionary search: children of two good plans, some of them changed, take the place of the worst.

What the backward pass completes early goes one parent's way and what it completes late the other's, which keeps what
each of them does well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.search.base import SEARCHED, Candidate
from autopar.search.builders.common import issue_order
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Groups, Neighbourhood
from autopar.search.searchers.base import Searcher, starts, tries
from autopar.spec.plan import SyncGroup

POPULATION = 12
RIVALS = 3
"""Of which each parent is the best (a tournament)."""
MUTATED = 0.6
"""Part of the children that are changed once more."""


class Evolutionary(Searcher):
    """Starts from the seeds, and from the best few of what was found before."""

    def __init__(self, patience: int = 300, share: float = 1.0) -> None:
        self.patience = patience
        """New plans in a row, none the best so far, after which it stops."""
        self.share = share
        """Part of the budget that may be used up when it stops."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        draw, near = random.Random(seed), Neighbourhood(evaluate.problem)
        population = starts([*starts(evaluate.candidates, POPULATION // 3), *starts(seeds, POPULATION)], POPULATION)
        if not population:
            return
        idle = 0
        for _ in tries(evaluate, self.share):
            if idle >= self.patience:
                break
            first, second = (min(draw.choices(population, k=RIVALS), key=lambda c: c.order) for _ in range(2))
            mixed = crossed(first.groups, second.groups, near, draw)
            groups = near.neighbour(mixed, draw) if first is second or draw.random() < MUTATED else mixed
            known = len(evaluate.candidates)
            child = None if groups is None else evaluate(SEARCHED, groups)
            if child is None:
                continue
            idle = 0 if child.order < population[0].order else idle + len(evaluate.candidates) - known
            if all(child.order != c.order for c in population):
                population = sorted([*population, child], key=lambda c: c.order)[:POPULATION]


def crossed(first: Groups, second: Groups, near: Neighbourhood, draw: random.Random) -> Groups:
    """Parameters whose gradients are complete before a random point go as in the first plan, the others as in the
    second."""
    names = sorted(near.table, key=lambda name: near.table[name].ready)
    early = set(names[: draw.randrange(1, len(names))]) if len(names) > 1 else set(names)

    def part(groups: Groups, kept: bool) -> list[SyncGroup]:
        chosen = []
        for group in groups:
            members = tuple(m for m in group.members if (m.name in early) == kept)
            if members:
                chosen.append(group.model_copy(update={"members": members}))
        return chosen

    return issue_order(part(first, True) + part(second, False), near.parameters)
