"""The runner-up of each group: the best other strategy for it, with the whole plan priced anew.

What a strategy costs alone says little: what is sent may be hidden behind compute, and what is saved may be waited for
elsewhere. So one group is switched, all others stay, and the cost model prices the plan as it then is. That takes as
long as pricing any plan, so groups that are alike share one answer, and the largest come first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from autopar.cost_models.base import Estimate
from autopar.cost_models.steps import predict_steps
from autopar.errors import PlanError
from autopar.ir.branches import left_out
from autopar.ir.training_graph import Parameter
from autopar.search.base import Problem
from autopar.search.evaluate import overflow_bytes
from autopar.search.moves import Choice, Groups, Neighbourhood
from autopar.spec.plan import ParameterSlice, RunnerUp, SyncGroup

MAX_OPTIONS = 8
"""Options of one strategy that are compared at most; where there are more, they are owners, which are nearly equal."""
LEAST_KINDS, LEAST_CHOICES, LEAST_S = 3, 1, 1.0
"""Kinds of groups, the largest, and strategies of each, those that are cheapest alone, that are priced beyond the time
that there is, and for how many seconds at most."""

AloneSeconds = Callable[[SyncGroup], float | None]
"""From a group to the seconds that it takes by itself; `None` where its strategy cannot be used on it."""


@dataclass(frozen=True)
class _Kind:
    """Groups of a plan that are alike."""

    indices: tuple[int, ...]
    num_bytes: int
    """Bytes of all groups of the kind."""

    @property
    def priced(self) -> int:
        """The group that stands for the kind: the middle one in issue order."""
        return self.indices[len(self.indices) // 2]


class RunnersUp:
    """Finds the runners-up of one problem's groups."""

    def __init__(self, problem: Problem, near: Neighbourhood, alone_s: AloneSeconds) -> None:
        self.problem = problem
        self.near = near
        self.alone_s = alone_s

    def of(self, groups: Groups, estimate: Estimate, seconds: float) -> dict[int, RunnerUp | None]:
        """The runners-up of a plan that was priced, by the index of the group; `None` where no other strategy can be
        used, or fits. Once `seconds` are over, only the least is priced, for `LEAST_S`: the other groups are left
        out."""
        found: dict[int, RunnerUp | None] = {}
        if self.problem.context.world_size == 1:
            return found
        ends = time.monotonic() + seconds
        for place, kind in enumerate(self._kinds(groups)):
            least = LEAST_CHOICES if place < LEAST_KINDS else 0
            try:
                best = self._best(groups, kind.priced, estimate, least, ends)
            except TimeoutError:
                break
            for index in kind.indices:
                found[index] = best
        return found

    def _best(self, groups: Groups, index: int, estimate: Estimate, least: int, ends: float) -> RunnerUp | None:
        """The fastest of the plans in which the group of this index has another strategy. The first `least` of the
        choices are priced for `LEAST_S` beyond the end. Raises `TimeoutError` where there is no time for any."""
        best: RunnerUp | None = None
        overflow = overflow_bytes(self.problem, estimate.peak_memory_bytes)
        latest = ends + LEAST_S if least else ends
        for number, choice in enumerate(self.choices(groups[index], latest)):
            if number >= max(1, least) and time.monotonic() >= ends:
                break
            other = self.priced(switched(groups, index, choice))
            if other is None or overflow_bytes(self.problem, other.peak_memory_bytes) > overflow:
                continue
            if best is None or other.step_time_s < best.step_time_s:
                best = RunnerUp(
                    strategy=choice.strategy,
                    options=dict(choice.options),
                    step_time_s=float(other.step_time_s),
                    cost_s=float(other.step_time_s - estimate.step_time_s),
                    priced_group=index,
                )
        return best

    def priced(self, groups: Groups) -> Estimate | None:
        """The cost model's estimate of a plan with these groups; `None` where a strategy cannot be used."""
        p = self.problem
        try:
            return predict_steps(p.cost_model, groups, p.graph, p.context, p.topology)
        except PlanError:
            return None

    def choices(self, group: SyncGroup, latest: float) -> list[Choice]:
        """Every other strategy that the group can use, with the options that are the cheapest alone; of strategies, the
        cheapest first. Raises `TimeoutError` where they are not all priced by `latest`, by the monotonic clock."""
        found: list[tuple[float, Choice]] = []
        for strategy, offered in self.near.choices.items():
            if strategy == group.strategy or not self.near.possible(offered[0], group):
                continue
            usable: list[tuple[float, Choice]] = []
            for choice in offered[:MAX_OPTIONS]:
                if time.monotonic() >= latest:
                    raise TimeoutError
                seconds = self.alone_s(switched((group,), 0, choice)[0])
                usable += [(seconds, choice)] if seconds is not None else []
            if usable:
                found.append(min(usable, key=lambda c: c[0]))
        return [choice for _, choice in sorted(found, key=lambda c: c[0])]

    def _kinds(self, groups: Groups) -> list[_Kind]:
        """The kinds of groups, by the bytes that each holds in all, the most first."""
        alike: dict[Hashable, list[int]] = {}
        for index, group in enumerate(groups):
            # Nothing that follows hides what the last group sends.
            key = (*self._kind(group), index == len(groups) - 1)
            alike.setdefault(key, []).append(index)
        kinds = [
            _Kind(tuple(indices), len(indices) * self.near.bytes_of(groups[indices[0]])) for indices in alike.values()
        ]
        return sorted(kinds, key=lambda kind: -kind.num_bytes)

    def _kind(self, group: SyncGroup) -> tuple[Hashable, ...]:
        """What is the same for groups that are alike. Whole numbers among the options, as owners, are not."""
        options = ((k, "number" if type(v) is int else v) for k, v in sorted(group.options.items()))
        members = tuple(_likeness(m, self.near.table[m.name]) for m in group.members)
        spared = left_out(self.near.table[m.name].branch for m in group.members)
        return (group.strategy, tuple(group.timing.items()), tuple(options), members, spared)


def switched(groups: Sequence[SyncGroup], index: int, choice: Choice) -> Groups:
    """The groups, of which one has another strategy and options; it synchronizes when it did."""
    update = {"strategy": choice.strategy, "options": dict(choice.options), "reason": "", "runner_up": None}
    return (*groups[:index], groups[index].model_copy(update=update), *groups[index + 1 :])


def _likeness(piece: ParameterSlice, parameter: Parameter) -> Hashable:
    """What strategies and their costs depend on, but for where in the graph the parameter is."""
    return (piece.shape(parameter.spec), parameter.spec.dtype, parameter.sizes)
