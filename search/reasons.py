"""Why a group is synchronized as it is, in plain words: what it costs, and what the next best strategy would cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.base import Estimate
from autopar.formatting import duration, number_of, size
from autopar.ir.branches import left_out
from autopar.ops.spared import used_share
from autopar.search.base import TIE, Problem
from autopar.search.moves import Choice, Groups, Neighbourhood
from autopar.search.runner_up import LEAST_S, RunnersUp
from autopar.spec.plan import RunnerUp, SyncGroup


@dataclass(frozen=True, slots=True)
class AloneCost:
    """What one group costs by itself, with nothing beside it."""

    channel_s: float
    device_s: float
    share: float
    """In how many steps it has anything to do, 0 to 1."""

    @property
    def total_s(self) -> float:
        return self.channel_s + self.device_s

    def __str__(self) -> str:
        return f"{duration(self.channel_s)} on the network and {duration(self.device_s)} on the device"


class Reasons:
    """Writes the reasons of one problem's groups."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # Where the cost model prices only whole plans, the analytic prices explain a group just as well.
        self._pricer = problem.pricer or StepPricer(problem.graph, problem.topology)
        self._near = Neighbourhood(problem)
        self._known: dict[tuple[object, ...], AloneCost | None] = {}
        self._runners_up = RunnersUp(problem, self._near, self._alone_s)

    def of(self, groups: Groups, estimate: Estimate, seconds: float) -> Groups:
        """The groups of a plan that was priced, each with its reason and its runner-up. `seconds`: how long runners-up
        may be looked for; those of a few large groups may be for `LEAST_S` more."""
        latest = time.monotonic() + seconds + LEAST_S
        found = self._runners_up.of(groups, estimate, seconds)
        return tuple(
            g.model_copy(update={"reason": self._reason(i, g, found, estimate, latest), "runner_up": found.get(i)})
            for i, g in enumerate(groups)
        )

    def _reason(
        self,
        index: int,
        group: SyncGroup,
        found: Mapping[int, RunnerUp | None],
        estimate: Estimate,
        latest: float,
    ) -> str:
        head = f"{number_of(len(group.members), 'tensor')}, {size(self._near.bytes_of(group))}"
        pins = [str(pin) for m in group.members if (pin := self.problem.rules.pins.get(m.name))]
        by = ", ".join(dict.fromkeys(pins))
        if len(pins) == len(group.members):
            return f"{head}: pinned by {by}"
        if pins:
            head = f"{head}, {len(pins)} of {len(group.members)} pinned by {by}"
        if self.problem.context.world_size == 1:
            return f"{head}: with one rank there is nothing to synchronize"
        mine = self._cost(group)
        assert mine is not None, "a chosen group can be lowered"
        used = f", used in some {mine.share:.0%} of the steps" if mine.share < 1 else ""
        text = f"{head}{used}: alone, {mine}"
        other = found.get(index)
        if other is None:
            return text + self._without_runner_up(group, index in found, bool(pins), latest)
        choice = Choice(other.strategy, other.options)
        alone = self._cost(choice.of(group))
        said = f" (alone, {alone})" if alone is not None else ""
        alike = sum(o is other for o in found.values())
        shared = f", as priced for group {other.priced_group} of {alike} that are alike" if alike > 1 else ""
        return f"{text}; {_in_the_step(choice, other, estimate.step_time_s)}{said}{shared}"

    def _without_runner_up(self, group: SyncGroup, priced: bool, pinned: bool, latest: float) -> str:
        if pinned:
            return "; the pin leaves the group no other strategy"
        try:
            choices = self._runners_up.choices(group, float("inf") if priced else latest)
        except TimeoutError:
            return "; what other strategies would take was not priced"
        if not choices:
            return "; no other strategy can be used here"
        if priced:
            return "; no other strategy leaves the plan within the devices' memory"
        cost = self._cost(choices[0].of(group))
        return f"; alone, {choices[0]} would take {cost}: what the step would gain or lose by it was not priced"

    def _alone_s(self, group: SyncGroup) -> float | None:
        cost = self._cost(group)
        return None if cost is None else cost.total_s

    def _cost(self, group: SyncGroup) -> AloneCost | None:
        # Groups of the same strategy, size, dtype and structure cost the same alone.
        members = [self._near.table[m.name] for m in group.members]
        options = tuple(sorted(group.settings.items()))
        structure = tuple(m.sizes for m in members), left_out(m.branch for m in members)
        key = (group.strategy, options, structure, self._near.bytes_of(group), members[0].spec.dtype)
        if key not in self._known:
            self._known[key] = self._price(group)
        return self._known[key]

    def _price(self, group: SyncGroup) -> AloneCost | None:
        program = self.problem.alone(group)
        if program is None:
            return None
        share = used_share(program.groups[0], [c for c in program.calls if c.group is not None], program.context)
        return AloneCost(*self._pricer.alone_s(program), share)


def _in_the_step(choice: Choice, other: RunnerUp, step_time_s: float) -> str:
    """What the step gains or loses by the runner-up, in words."""
    if abs(other.cost_s) <= 1e-6 * step_time_s:
        return f"next best is {choice}, with which the step takes as long"
    if other.cost_s > 0:
        return f"next best is {choice}, +{duration(other.cost_s)} a step"
    if -other.cost_s < TIE * step_time_s:
        return f"next best is {choice}, -{duration(-other.cost_s)} a step, which counts as equally fast"
    return f"better would be {choice}, -{duration(-other.cost_s)} a step"
