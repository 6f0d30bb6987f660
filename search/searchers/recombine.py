"""The strategies of all groups at once: of very many combinations, the few that a lower bound does not rule out.

What the best strategy of a group is depends on what the others fill: one that sends less may be worth its work only
while the network is full. Switching one group at a time cannot see that; pricing every combination takes too long. So
each group is priced once under each strategy, combinations are bounded by sums, and the most promising are simulated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.bound import Bound
from autopar.search.base import SEARCHED, Candidate, executed
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Choice, Groups, Neighbourhood
from autopar.spec.plan import SyncGroup

COMBINATIONS = 20_000
TRIED = 8
"""Of them, as many are simulated."""
KEPT = 0.9
"""How likely a group keeps its strategy, at most: combinations lie at all distances from the plan."""
MOST_GROUPS = 64
"""Of more groups, pricing each under each strategy takes as long as simulating many plans."""


class Recombination:
    """Of the groups of plans for one problem."""

    def __init__(self, evaluate: Evaluator, near: Neighbourhood, pricer: StepPricer) -> None:
        self.evaluate = evaluate
        self.near = near
        self.bound = Bound(pricer)
        self._rows: dict[object, int | None] = {}

    def improve(self, best: Candidate, draw: random.Random) -> Candidate:
        """The best of the combinations that were simulated, or the plan itself."""
        groups = best.groups
        if len(groups) > MOST_GROUPS:
            return best
        offered = [self._offered(group) for group in groups]
        if sum(len(o) > 1 for o in offered) < 2:
            return best
        for chosen in self._promising(offered, best.step_time_s, np.random.default_rng(draw.randrange(2**31))):
            if self.evaluate.spent:
                break
            changed: Groups = tuple(list(o.values())[k].of(g) for g, o, k in zip(groups, offered, chosen, strict=True))
            candidate = self.evaluate(SEARCHED, changed)
            if candidate is not None and candidate.order < best.order:
                best = candidate
        return best

    def _offered(self, group: SyncGroup) -> Mapping[int, Choice]:
        """What a group may be synchronized by, its own strategy first, by the number of the bound's row."""
        own = Choice(group.strategy, group.options)
        choices = [own, *(c for offered in self.near.choices.values() for c in offered if self.near.possible(c, group))]
        found: dict[int, Choice] = {}
        for choice in choices:
            row = self._row(choice.of(group))
            if row is not None:
                found.setdefault(row, choice)
        return found

    def _row(self, group: SyncGroup) -> int | None:
        key = executed((group,))
        if key not in self._rows:
            program = self.evaluate.problem.alone(group)
            self._rows[key] = None if program is None else self.bound.add(program)
        return self._rows[key]

    def _promising(
        self, offered: list[Mapping[int, Choice]], limit_s: float, draw: np.random.Generator
    ) -> list[list[int]]:
        """Indices of choices, one a group, of the combinations with the lowest bounds: all below the limit."""
        counts = np.array([len(o) for o in offered])
        picked = (draw.random((COMBINATIONS, len(counts))) * counts).astype(np.int64)
        kept = draw.random((COMBINATIONS, len(counts))) < KEPT * draw.random((COMBINATIONS, 1))
        picked[kept] = 0
        rows = np.zeros_like(picked)
        for column, found in enumerate(offered):
            rows[:, column] = np.array(list(found))[picked[:, column]]
        bounds = self.bound.of(rows)
        order = np.argsort(bounds, kind="stable")[: 4 * TRIED]
        distinct = dict.fromkeys(tuple(picked[i].tolist()) for i in order if bounds[i] < limit_s)
        return [list(chosen) for chosen in distinct][:TRIED]
