"""Dynamic programming over where one group ends and the next begins, and how each of them is synchronized.

Gradients become ready one after the other and groups are sent one after the other, so the first j of them are done at

    done(j) = min over i < j and choices c of  max(done(i), ready(j)) + seconds(i..j, c)

which finds, of exponentially many ways to cut a sequence, the one that is done first (Bellman, 1957; for buckets of
gradients as in MG-WFBP, Shi, Chu and Li, 2019, which cuts them greedily). What a group takes by itself is priced by
the cost model for each piece and for all of them in one; what lies between is taken to grow by each piece alike. The
plans that come of it are then simulated like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_models.analytic import StepPricer
from autopar.search.base import SEARCHED, Candidate
from autopar.search.builders.common import issue_order, piece_bytes
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Choice, Groups, Neighbourhood
from autopar.search.searchers.base import Searcher, starts
from autopar.spec.plan import ParameterSlice, SyncGroup

PIECES = 48
"""Parameters next to each other are taken together, until there are so few."""
DEVICE_SHARES = (0.0, 0.3, 1.0)
"""How much of what a group takes from the device counts as time that the next one waits: a part of it is hidden."""
OWNERS = 4
"""Options of one strategy that are tried; where there are more, they are owners, which are nearly equal."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Costs:
    """What runs of pieces take under one choice."""

    choice: Choice
    pieces: tuple[Seconds, Seconds]
    """[pieces] each: on the channel and on the device, each piece by itself."""
    saved: tuple[float, float]
    """Seconds, on the channel and on the device, that each piece saves by being in one group with the one before it."""

    def run(self, begin: int, end: int, device_share: float) -> Seconds:
        """Seconds of the runs from each piece of `begin` to `end` - 1 up to `end`: [end - begin]."""
        total = np.zeros(end - begin)
        joined = np.arange(end - begin - 1, -1, -1)
        for share, pieces, saved in zip((1.0, device_share), self.pieces, self.saved, strict=True):
            total += share * (np.cumsum(pieces[begin:end][::-1])[::-1] - saved * joined)
        return total


class DynamicProgramming(Searcher):
    """Cuts the groups of the best seeds anew, those of one strategy and dtype at a time."""

    def __init__(self, starts: int = 3) -> None:
        self.starts = starts

    def search(self, seeds: Sequence[Candidate], evaluate: Evaluator, *, seed: int = 0) -> None:
        pricer = evaluate.problem.pricer
        if pricer is None:
            return
        cuts = Cuts(evaluate, Neighbourhood(evaluate.problem), pricer)
        for start in starts(seeds, self.starts):
            cuts.improve(start)


class Cuts:
    """Cuts the groups of plans for one problem anew."""

    def __init__(self, evaluate: Evaluator, near: Neighbourhood, pricer: StepPricer) -> None:
        self.evaluate = evaluate
        self.near = near
        self.pricer = pricer
        device = int(np.argmax([prefix[-1] for prefix in pricer.graph_streams.prefix_s]))
        self._done_s = pricer.graph_streams.prefix_s[device]

    def improve(self, best: Candidate) -> Candidate:
        """The plan, with each set of groups that agree in strategy and dtype cut anew where that makes it shorter."""
        for like in _alike(best.groups, self.near):
            if self.evaluate.spent:
                break
            recut = {member for group in like for member in group.members}
            others = tuple(g for g in best.groups if g.members[0] not in recut)
            for cut in self._cuts(like):
                if self.evaluate.spent:
                    break
                candidate = self.evaluate(SEARCHED, issue_order((*others, *cut), self.near.parameters))
                if candidate is not None and candidate.order < best.order:
                    best = candidate
        return best

    def _cuts(self, groups: Sequence[SyncGroup]) -> list[Groups]:
        """The members of these groups in other groups."""
        members = [m for group in groups for m in group.members]
        members.sort(key=lambda m: self.near.table[m.name].ready)
        pieces = self._pieces(members)
        offered = [c for c in (self._costs(pieces, c) for c in self._choices(members)) if c is not None]
        if not offered:
            return []
        ready_s = [self._done_s[max(self.near.table[m.name].ready for m in piece) + 1] for piece in pieces]
        return [self._best(pieces, offered, ready_s, share) for share in DEVICE_SHARES]

    def _pieces(self, members: Sequence[ParameterSlice]) -> list[list[ParameterSlice]]:
        """Members next to each other, in at most `PIECES` pieces of about as many bytes."""
        sizes = [piece_bytes((m, self.near.table[m.name])) for m in members]
        least = sum(sizes) / PIECES if len(members) > PIECES else 0.0
        pieces: list[list[ParameterSlice]] = []
        filled = float("inf")
        for member, size in zip(members, sizes, strict=True):
            if filled >= least:
                pieces.append([])
                filled = 0.0
            pieces[-1].append(member)
            filled += size
        return pieces

    def _choices(self, members: Sequence[ParameterSlice]) -> list[Choice]:
        group = SyncGroup(strategy="all_reduce", members=tuple(members))
        offered = self.near.choices.values()
        return [c for choices in offered if self.near.possible(choices[0], group) for c in choices[:OWNERS]]

    def _costs(self, pieces: Sequence[Sequence[ParameterSlice]], choice: Choice) -> _Costs | None:
        each = [self._alone(choice, piece) for piece in pieces]
        whole = self._alone(choice, [m for piece in pieces for m in piece])
        if whole is None or any(one is None for one in each):
            return None
        channel, device = (np.array(row) for row in zip(*(one for one in each if one is not None), strict=True))
        joined = max(1, len(pieces) - 1)
        saved = (channel.sum() - whole[0]) / joined, (device.sum() - whole[1]) / joined
        return _Costs(choice, (channel, device), (float(saved[0]), float(saved[1])))

    def _alone(self, choice: Choice, members: Sequence[ParameterSlice]) -> tuple[float, float] | None:
        group = choice.of(SyncGroup(strategy=choice.strategy, members=tuple(members)))
        program = self.evaluate.problem.alone(group)
        return None if program is None else self.pricer.alone_s(program)

    def _best(
        self,
        pieces: Sequence[Sequence[ParameterSlice]],
        offered: Sequence[_Costs],
        ready_s: Sequence[float],
        device_share: float,
    ) -> Groups:
        """The cut that is done first."""
        done = np.zeros(len(pieces) + 1)
        taken: list[tuple[int, Choice]] = []
        for end in range(1, len(pieces) + 1):
            begun = np.maximum(done[:end], ready_s[end - 1])
            times = np.stack([begun + costs.run(0, end, device_share) for costs in offered])
            which, begin = np.unravel_index(int(times.argmin()), times.shape)
            done[end] = times[which, begin]
            taken.append((int(begin), offered[int(which)].choice))
        groups: list[SyncGroup] = []
        end = len(pieces)
        while end:
            first, choice = taken[end - 1]
            members = tuple(m for piece in pieces[first:end] for m in piece)
            groups.append(choice.of(SyncGroup(strategy=choice.strategy, members=members)))
            end = first
        return tuple(reversed(groups))


def _alike(groups: Groups, near: Neighbourhood) -> list[list[SyncGroup]]:
    """The groups by strategy and dtype, those with the most bytes first."""
    found: dict[tuple[str, str], list[SyncGroup]] = {}
    for group in groups:
        found.setdefault((group.strategy, near.table[group.members[0].name].spec.dtype), []).append(group)
    return sorted(found.values(), key=lambda like: sum(map(near.bytes_of, like)), reverse=True)
