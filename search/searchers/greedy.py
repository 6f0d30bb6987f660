"""Coordinate descent: group by group, the largest first, the choice that makes the step shortest, all others kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.search.base import SEARCHED, Candidate
from autopar.search.builders.common import issue_order
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Groups, Neighbourhood, merged
from autopar.search.searchers.base import Searcher, starts
from autopar.spec.plan import SyncGroup


class Greedy(Searcher):
    """Improves the best seeds, one after the other, until no single choice and no merger makes the step shorter."""

    def __init__(self, starts: int = 3) -> None:
        self.starts = starts

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        near = Neighbourhood(evaluate.problem)
        for start in starts(seeds, self.starts):
            descend(start, near, evaluate)


def descend(best: Candidate, near: Neighbourhood, evaluate: Evaluator) -> Candidate:
    """The plan after all changes that helped, when none helps any more or the budget is spent."""
    improved = True
    while improved and not evaluate.spent:
        improved = False
        for group in sorted(best.groups, key=lambda g: -near.bytes_of(g)):
            for changed in _changes(best.groups, group, near):
                if evaluate.spent:
                    break
                candidate = evaluate(SEARCHED, changed)
                if candidate is not None and candidate.order < best.order:
                    best, improved = candidate, True
    return best


def _changes(groups: Groups, group: SyncGroup, near: Neighbourhood) -> Iterator[Groups]:
    """The plan with another choice for this group, and with this group and its neighbour as one."""
    if group not in groups:  # it became another one meanwhile
        return
    i = groups.index(group)
    for offered in near.choices.values():
        if near.possible(offered[0], group):
            for choice in offered:
                yield issue_order((*groups[:i], choice.of(group), *groups[i + 1 :]), near.parameters)
    joined = merged(groups, i, near.table)
    if joined is not None:
        yield issue_order(joined, near.parameters)
