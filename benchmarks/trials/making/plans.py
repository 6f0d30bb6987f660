"""Plans to try: what a person would write, random walks from there, and random partitions with random strategies.

A cost model that is to tell good plans from bad ones must have seen both, so most of these are nobody's choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from autopar.errors import PlanError
from autopar.search.base import Problem
from autopar.search.builders import builder_named, names
from autopar.search.builders.common import by_readiness, issue_order
from autopar.search.moves import Groups, Neighbourhood
from autopar.spec.plan import ParameterSlice, SyncGroup, partition_problems
from autopar.strategies import strategy_named
from autopar.strategies.lowering import StepProgram, lower_plan
from benchmarks.trials.records import ALWAYS

LONGEST_WALK = 16
ATTEMPTS = 50
"""Random groups that are drawn for one plan, until one can be lowered."""
MOST_GROUPS = 200


class PlanSource:
    """Draws plans for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.near = Neighbourhood(problem)
        self.names = names(rounded=True, late=problem.context.late_parameters)
        self._spices: tuple[Callable[[Groups, random.Random], Groups | None], ...] = (
            self._unequal_shares,
            self._sliced,
            self._wire,
        )

    def draw(self, draw: random.Random) -> tuple[str, Groups, StepProgram]:
        """Where the plan comes from, its groups, and the program that they are lowered to."""
        for _ in range(ATTEMPTS):
            origin, groups = self._any(draw)
            program = self._lowered(groups)
            if program is not None and len(groups) <= MOST_GROUPS:
                return origin, groups, program
        groups = self.built(ALWAYS)
        return ALWAYS, groups, lower_plan(groups, self.problem.graph, self.problem.context)

    def _any(self, draw: random.Random) -> tuple[str, Groups]:
        name = draw.choice(self.names)
        lot = draw.random()
        if lot < 0.25:
            return name, self.built(name)
        groups = self.built(name) if lot < 0.7 else self._scratch(draw)
        for _ in range(draw.randrange(LONGEST_WALK)):
            groups = self.near.neighbour(groups, draw) or groups
        for spice in self._spices:
            if draw.random() < 0.3:
                groups = spice(groups, draw) or groups
        return "random", issue_order(groups, self.problem.graph.parameters)

    def built(self, name: str) -> Groups:
        """The plan of one builder."""
        return builder_named(name)(self.problem.graph.parameters, self.problem.context, self.problem.cluster)

    def _lowered(self, groups: Groups) -> StepProgram | None:
        if partition_problems(groups, self.problem.graph.model.parameters):
            return None
        try:
            return lower_plan(groups, self.problem.graph, self.problem.context)
        except PlanError:
            return None

    def _scratch(self, draw: random.Random) -> Groups:
        """Parameters in the order of their gradients, cut at random places; a random strategy for each piece."""
        parameters = by_readiness(self.problem.graph.parameters)
        offered = [choice for choices in self.near.choices.values() for choice in choices]
        some = draw.sample(offered, min(len(offered), draw.choice((1, 1, 2, 4))))
        most = min(len(parameters), MOST_GROUPS) - 1
        count = round((most + 1) ** draw.random()) - 1
        cuts = sorted(draw.sample(range(1, len(parameters)), min(count, most)))
        groups: list[SyncGroup] = []
        for a, b in zip([0, *cuts], [*cuts, len(parameters)], strict=True):
            for dtype in dict.fromkeys(p.spec.dtype for p in parameters[a:b]):
                members = tuple(ParameterSlice(name=p.name) for p in parameters[a:b] if p.spec.dtype == dtype)
                groups.append(draw.choice(some).of(SyncGroup(strategy="all_reduce", members=members)))
        return tuple(groups)

    def _unequal_shares(self, groups: Groups, draw: random.Random) -> Groups | None:
        """Ranks own parts of different sizes, wherever a strategy has shares."""
        shares = tuple(round(draw.uniform(0.1, 1.0), 2) if draw.random() < 0.9 else 0.0 for _ in self._ranks)
        if not any(shares):
            return None
        return self._with_option(groups, "shares", shares, draw)

    def _wire(self, groups: Groups, draw: random.Random) -> Groups | None:
        """Another number format on the wire, for some groups."""
        return self._with_option(groups, "wire", draw.choice(("same", "bfloat16", "float16")), draw)

    def _with_option(self, groups: Groups, key: str, value: object, draw: random.Random) -> Groups:
        share = draw.random()
        return tuple(
            g.model_copy(update={"options": {**g.options, key: value}})
            if key in strategy_named(g.strategy).options_type.model_fields and draw.random() < share
            else g
            for g in groups
        )

    def _sliced(self, groups: Groups, draw: random.Random) -> Groups | None:
        """One large parameter in slices of different sizes, each in a group of its own with an owner of its own."""
        table = self.near.table
        whole = [
            (i, m)
            for i, g in enumerate(groups)
            for m in g.members
            if m.whole and (table[m.name].spec.shape or (0,))[0] > 1
        ]
        if not whole:
            return None
        i, member = max(draw.sample(whole, min(len(whole), 4)), key=lambda at: table[at[1].name].numel)
        extent = table[member.name].spec.shape[0]
        cuts = sorted(draw.sample(range(1, extent), min(extent - 1, draw.randint(1, len(self._ranks)))))
        pieces = [
            ParameterSlice(name=member.name, dim=0, start=a, stop=b)
            for a, b in zip([0, *cuts], [*cuts, extent], strict=True)
        ]
        owned = draw.random() < 0.7
        new = [
            SyncGroup(strategy="parameter_server", members=(p,), options={"owner": draw.choice(self._ranks)})
            if owned
            else SyncGroup(strategy=groups[i].strategy, members=(p,), options=groups[i].options)
            for p in pieces
        ]
        rest = tuple(m for m in groups[i].members if m is not member)
        kept = (groups[i].model_copy(update={"members": rest}),) if rest else ()
        return (*groups[:i], *kept, *new, *groups[i + 1 :])

    @property
    def _ranks(self) -> Sequence[int]:
        return range(self.problem.context.world_size)
