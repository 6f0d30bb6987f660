"""Ever shorter stretches of the backward pass, each switched as a whole: from all of it down to sixteenths.

Where groups are many, a single switch changes little, and the one that pays may need others beside it: parameters that
are gathered in the forward pass pay where the backward pass is full. So the best plan is cut into buckets of several
sizes; then all groups are synchronized alike, in every way that is not far slower by itself than another one; then each
half, in those ways that did best for the whole; and so on (pattern search with halved steps, as Hooke and Jeeves,
1961).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.search.base import SEARCHED, Candidate
from autopar.search.builders.common import issue_order
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Choice, Groups, Kind, Neighbourhood
from autopar.search.searchers.base import Searcher
from autopar.spec.plan import ParameterSlice, SyncGroup

BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192)
"""Numbers of buckets, about, into which the parameters are cut."""
THIRD = 3
"""Of these, every third one is tried first."""
SHORTEST = 1 / 16
"""The shortest stretches hold this part of the groups, or of the parameters where groups are few."""
SLOWER = 2.0
"""A strategy is tried where it takes, alone, at most this many times as long as the fastest one for the same
parameters."""
BEST = 4
"""Choices that go on from a stretch to its halves."""
MOST_OPTIONS = 8
"""Options of one strategy that are tried; where there are more, they are owners, which are nearly equal."""


@dataclass(frozen=True)
class _Stretch:
    """A part of the plan's groups of one kind, from 0 to 1, and what they may be switched to."""

    kind: Kind
    begin: float
    end: float
    choices: Sequence[Choice]

    def halves(self, choices: Sequence[Choice]) -> list[_Stretch]:
        """Both, with these choices; none where they would be too short."""
        middle = (self.begin + self.end) / 2
        if middle - self.begin < SHORTEST or not choices:
            return []
        return [_Stretch(self.kind, self.begin, middle, choices), _Stretch(self.kind, middle, self.end, choices)]


class Stretches(Searcher):
    """Improves the best plan of all that was found, again and again, until that helps no more."""

    def __init__(self, share: float = 1.0, at_least: int = 0, most: float = 1.0) -> None:
        self.share = share
        """Part of the budget that may be used up when it stops."""
        self.at_least, self.most = at_least, most
        """Plans that it prices in any case, until this part of the budget is used up."""

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        until = evaluate.priced + self.at_least

        def is_done() -> bool:
            return evaluate.used >= (self.share if evaluate.priced >= until else max(self.share, self.most))

        over = _Over(evaluate, is_done)
        while (before := evaluate.best) is not None and not over.is_done():
            over.bucket_sizes()
            over.stretches()
            if evaluate.best is before:
                break


class _Over:
    """Goes over the best plan of an evaluator."""

    def __init__(self, evaluate: Evaluator, is_done: Callable[[], bool]) -> None:
        self.evaluate = evaluate
        self.is_done = is_done
        self.near = Neighbourhood(evaluate.problem)

    @property
    def groups(self) -> Groups:
        """Of the best plan."""
        assert self.evaluate.best is not None
        return self.evaluate.best.groups

    def bucket_sizes(self) -> None:
        """Prices the best plan with buckets of every third size; then with those next to the best of these."""
        found: dict[int, Candidate] = {}
        for at in range(0, len(BUCKETS), THIRD):
            self._bucket_size(at, found)
        if found:
            best = min(found, key=lambda at: found[at].order)
            for at in range(max(0, best - THIRD + 1), min(len(BUCKETS), best + THIRD)):
                self._bucket_size(at, found)

    def _bucket_size(self, at: int, found: dict[int, Candidate]) -> None:
        if not self.is_done() and at not in found:
            size = max(1, self.near.bytes_total // BUCKETS[at])
            candidate = self.evaluate(SEARCHED, self.near.rebucketed(self.groups, size))
            found |= {at: candidate} if candidate is not None else {}

    def stretches(self) -> None:
        """Switches stretches of the best plan, the longest first."""
        kinds: dict[Kind, list[ParameterSlice]] = {}
        for group in self.groups:
            kinds.setdefault(self.near.kind(group), []).extend(group.members)
        todo = deque(_Stretch(kind, 0.0, 1.0, self._promising(members)) for kind, members in kinds.items())
        while todo and not self.is_done():
            stretch = todo.popleft()
            todo += stretch.halves(self._switched(stretch))

    def _switched(self, stretch: _Stretch) -> list[Choice]:
        """Prices a stretch under each of its choices; returns those that did best, one of each step time."""
        parts = self._parts(stretch)
        if not any(inside for _, inside in parts):
            return []
        found: dict[tuple[int, str], tuple[Candidate, Choice]] = {}
        for choice in stretch.choices:
            if self.is_done():
                break
            changed = (one for g, inside in parts for one in (self.near.followed(choice, g) if inside else [g]))
            candidate = self.evaluate(SEARCHED, issue_order(changed, self.near.parameters))
            if candidate is not None:
                found.setdefault((candidate.overflow_bytes, f"{candidate.step_time_s:.4g}"), (candidate, choice))
        return [choice for _, choice in sorted(found.values(), key=lambda one: one[0].order)][:BEST]

    def _parts(self, stretch: _Stretch) -> list[tuple[SyncGroup, bool]]:
        """The groups, and whether each lies in the stretch. Where there are too few of them for short stretches, those
        are parted in which the stretch begins and ends."""
        mine = [self.near.kind(group) == stretch.kind for group in self.groups]
        many = sum(mine) >= 1 / SHORTEST
        sizes = [(1 if many else len(g.members)) if own else 0 for g, own in zip(self.groups, mine, strict=True)]
        begin, end = round(stretch.begin * sum(sizes)), round(stretch.end * sum(sizes))
        parts: list[tuple[SyncGroup, bool]] = []
        at = 0
        for group, size in zip(self.groups, sizes, strict=True):
            cuts = [b - at for b in (begin, end) if 0 < b - at < size and not self.near.holds_layer(group)]
            if cuts:
                bounds = [0, *dict.fromkeys(cuts), size]
                for low, high in itertools.pairwise(bounds):
                    part = group.model_copy(update={"members": group.members[low:high]})
                    parts.append((part, begin <= at + low < end))
            else:
                parts.append((group, size > 0 and begin <= at < end))
            at += size
        return parts

    def _promising(self, members: Sequence[ParameterSlice]) -> list[Choice]:
        """Choices that may be worth trying for parameters of one kind. A strategy is judged by the seconds that its
        first option takes for all of them in one group, or for those that it applies to beside an all-reduce of the
        others."""
        group = SyncGroup(strategy="all_reduce", members=tuple(members))
        pricer = self.evaluate.problem.pricer
        seconds: dict[str, float] = {}
        for name, options in self.near.choices.items():
            if self.is_done():
                break
            parts = self.near.followed(options[0], group)
            if len(parts) > 2 or parts[0].strategy != name:
                continue  # it holds layers, or nothing can follow
            alone = [program for part in parts if (program := self.evaluate.problem.alone(part)) is not None]
            if len(alone) == len(parts):
                seconds[name] = 0.0 if pricer is None else sum(sum(pricer.alone_s(program)) for program in alone)
        least = min(seconds.values(), default=0.0)
        fast = [name for name, s in seconds.items() if s <= SLOWER * least]
        return [choice for name in fast for choice in self.near.choices[name][:MOST_OPTIONS]]
