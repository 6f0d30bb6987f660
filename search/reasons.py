"""Why a group is synchronized as it is, in plain words: what it costs, and what the next best strategy would cost."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.analytic import StepPricer
from autopar.errors import PlanError
from autopar.formatting import duration, number_of, size
from autopar.search.base import Problem
from autopar.search.builders.common import piece_bytes
from autopar.search.moves import Choice, Groups, Neighbourhood
from autopar.spec.plan import SyncGroup
from autopar.strategies.lowering import lower_plan

MAX_OPTIONS = 8
"""Of one strategy that are compared; where there are more, they are owners, which are nearly equal."""


@dataclass(frozen=True, slots=True)
class AloneCost:
    """What one group takes by itself, with nothing beside it."""

    channel_s: float
    device_s: float

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

    def of(self, groups: Groups) -> Groups:
        """The groups, each with its reason."""
        return tuple(g.model_copy(update={"reason": self._reason(g)}) for g in groups)

    def _reason(self, group: SyncGroup) -> str:
        head = f"{number_of(len(group.members), 'tensor')}, {size(self._bytes(group))}"
        if pins := list(dict.fromkeys(str(pin) for m in group.members if (pin := self.problem.rules.pins.get(m.name)))):
            return f"{head}: pinned by {', '.join(pins)}"
        if self.problem.context.world_size == 1:
            return f"{head}: with one rank there is nothing to synchronize"
        mine = self._cost(group)
        assert mine is not None, "a chosen group can be lowered"
        text = f"{head}: alone, {mine}"
        other = self._next_best(group)
        if other is None:
            return f"{text}; no other strategy can be used here"
        choice, cost = other
        if cost.total_s < mine.total_s:
            return f"{text}. {choice}, alone, would take {cost}: less, but the step as a whole gains nothing by it"
        return f"{text}; next best is {choice}, with {cost}"

    def _next_best(self, group: SyncGroup) -> tuple[Choice, AloneCost] | None:
        """The cheapest other strategy."""
        best: tuple[Choice, AloneCost] | None = None
        for strategy, choices in self._near.choices.items():
            if strategy == group.strategy or not self._near.possible(choices[0], group):
                continue
            for choice in choices[:MAX_OPTIONS]:
                cost = self._cost(choice.of(group))
                if cost is not None and (best is None or cost.total_s < best[1].total_s):
                    best = (choice, cost)
        return best

    def _bytes(self, group: SyncGroup) -> int:
        return sum(piece_bytes((m, self._near.table[m.name])) for m in group.members)

    def _cost(self, group: SyncGroup) -> AloneCost | None:
        # Groups of the same strategy, size, dtype and number of members cost the same alone.
        dtype = self._near.table[group.members[0].name].spec.dtype
        options = tuple(sorted(group.settings.items()))
        key = (group.strategy, options, len(group.members), self._bytes(group), dtype)
        if key not in self._known:
            self._known[key] = self._price(group)
        return self._known[key]

    def _price(self, group: SyncGroup) -> AloneCost | None:
        try:
            program = lower_plan([group], self.problem.graph, self.problem.context)
        except PlanError:
            return None
        return AloneCost(*self._pricer.alone_s(program))
