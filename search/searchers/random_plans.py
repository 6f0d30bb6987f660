"""Random plans: what any other searcher has to beat with the same number of plans priced."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.ops.group import Member
from autopar.search.base import SEARCHED, Candidate
from autopar.search.builders.common import whole
from autopar.search.evaluate import Evaluator
from autopar.search.moves import MAX_BUCKETS, Groups, Neighbourhood
from autopar.search.searchers.base import Searcher, tries
from autopar.spec.plan import SyncGroup
from autopar.strategies import STRATEGIES

MIXED = (0.0, 0.1, 0.5, 1.0)
"""Which part of the parameters does not follow the choice that a plan draws for all of them; drawn for each plan."""


class RandomPlans(Searcher):
    """Draws plans one after the other, without regard to what was found."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        draw, near = random.Random(seed), Neighbourhood(evaluate.problem)
        for _ in tries(evaluate):
            evaluate(SEARCHED, drawn(near, draw))


def drawn(near: Neighbourhood, draw: random.Random) -> Groups:
    """A random plan: strategies that can be used, for whole parameters, in buckets of a random size."""
    common = {name: draw.choice(offered) for name, offered in near.choices.items()}
    favourite, mixed = draw.choice(list(common)), draw.choice(MIXED)
    groups: list[SyncGroup] = []
    for parameter in near.parameters:
        member = Member(*whole(parameter))
        possible = [n for n in near.choices if STRATEGIES[n].applies(member, near.problem.context) is None]
        name = favourite if favourite in possible and draw.random() >= mixed else draw.choice(possible)
        choice = common[name] if draw.random() >= mixed else draw.choice(near.choices[name])
        groups.append(choice.of(SyncGroup(strategy=name, members=(member.slice,))))
    kept = near.problem.rules.applied(tuple(groups))
    return near.rebucketed(kept, round(max(1, near.bytes_total) * MAX_BUCKETS ** -draw.random()))
