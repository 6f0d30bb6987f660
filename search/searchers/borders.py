"""All borders between neighbouring groups, moved at once by random numbers of members.

Where each border stands well for where the others stand, moving one of them makes any plan slower; several together may
make it faster. The distances become shorter by each plan that is no better, and longer by each that is: an evolution
strategy with one parent and one child, whose step sizes follow its successes (Rechenberg, 1973).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from autopar.search.base import SEARCHED, Candidate
from autopar.search.builders.common import issue_order
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Groups, Kind, Neighbourhood
from autopar.search.searchers.base import Searcher, tries
from autopar.search.searchers.local import simplify
from autopar.spec.plan import ParameterSlice, SyncGroup

WIDEST, NARROWEST = 0.5, 0.02
"""Standard deviation of a border's way, in mean lengths of a group of its kind: at first and at most, and at least."""
WIDER, NARROWER = 1.5, 0.97
"""What it is multiplied with after a plan that is faster, and after one that is not."""


class Borders(Searcher):
    """Moves the borders of the best plan of all that was found."""

    def __init__(self, patience: int = 100, share: float = 1.0) -> None:
        self.patience = patience
        """New plans in a row without improvement after which it stops."""
        self.share = share
        """Part of the budget that may be used up when it stops."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        draw, near = random.Random(seed), Neighbourhood(evaluate.problem)
        best = evaluate.best
        if best is None or evaluate.used >= self.share:
            return
        best = simplify(best, near, evaluate, self.share)
        if not _have_borders(best.groups, near):
            return
        spread, idle = WIDEST, 0
        for _ in tries(evaluate, self.share):
            if idle >= self.patience:
                break
            known = evaluate.priced
            candidate = evaluate(SEARCHED, moved(best.groups, spread, near, draw))
            if candidate is not None and candidate.order < best.order:
                best, spread, idle = candidate, min(WIDEST, spread * WIDER), 0
            else:
                spread, idle = max(NARROWEST, spread * NARROWER), idle + evaluate.priced - known


def _kinds(groups: Groups, near: Neighbourhood) -> list[list[SyncGroup]]:
    """The groups of each kind, but for those that hold a layer: these stay as they are."""
    kinds: dict[Kind, list[SyncGroup]] = {}
    for group in groups:
        if not near.holds_layer(group):
            kinds.setdefault(near.kind(group), []).append(group)
    return list(kinds.values())


def _have_borders(groups: Groups, near: Neighbourhood) -> bool:
    return any(len(alike) > 1 for alike in _kinds(groups, near))


def moved(groups: Groups, spread: float, near: Neighbourhood, draw: random.Random) -> Groups:
    """The groups with each border between two of one kind moved by a normally distributed number of members, whose
    standard deviation is `spread` mean lengths of a group. Groups that lose all their members are left out."""
    changed = [group for group in groups if near.holds_layer(group)]
    for alike in _kinds(groups, near):
        members = sorted((m for group in alike for m in group.members), key=near.place_of)
        mean = len(members) / len(alike)
        ends = itertools.accumulate(len(group.members) for group in alike[:-1])
        borders = sorted(min(len(members), max(0, round(draw.gauss(end, spread * mean)))) for end in ends)
        changed += _cut(members, borders, alike)
    return issue_order(changed, near.parameters)


def _cut(members: Sequence[ParameterSlice], borders: Sequence[int], alike: Sequence[SyncGroup]) -> list[SyncGroup]:
    """The members between one border and the next, as members of one group after the other."""
    parts = itertools.pairwise((0, *borders, len(members)))
    return [
        group.model_copy(update={"members": tuple(members[begin:end])})
        for group, (begin, end) in zip(alike, parts, strict=True)
        if begin < end
    ]
