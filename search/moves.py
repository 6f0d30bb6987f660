"""The steps of local improvement: each makes a neighbour of a plan's groups, or `None` where it cannot.

No move knows a strategy: what a group may be switched to is what the strategies themselves offer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.training_graph import Parameter
from autopar.ops.group import Member
from autopar.search.base import Problem
from autopar.search.builders.common import fuse, issue_order, piece_bytes
from autopar.spec.plan import OptionValue, ParameterSlice, SyncGroup
from autopar.strategies import STRATEGIES
from autopar.strategies.base import Options

Groups = tuple[SyncGroup, ...]

Kind = frozenset[str]
"""Of a group, by its largest parameter: the strategies that apply, and the dtype. Tables have others than layers."""

MAX_BUCKETS = 256
"""Buckets of equal size that the move `rebucket` goes up to: with more, latency alone costs more than it can hide."""


@dataclass(frozen=True)
class Choice:
    """A strategy with options, as a group may name it."""

    strategy: str
    options: Mapping[str, OptionValue]

    def of(self, group: SyncGroup) -> SyncGroup:
        """A copy of the group that is synchronized by this strategy and options."""
        return SyncGroup(strategy=self.strategy, members=group.members, options=dict(self.options))

    def __str__(self) -> str:
        shown = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.strategy} ({shown})" if shown else self.strategy


class Neighbourhood:
    """The moves, for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parameters: Sequence[Parameter] = problem.graph.parameters
        self.table = {p.name: p for p in self.parameters}
        self.choices = choices(problem)
        self.bytes_total = problem.graph.parameter_bytes
        self._kinds: dict[str, Kind] = {}
        # The moves that change what is sent come as often as those that change how it is cut: on the networks that
        # were measured, the former mattered 2 to 175 times, the latter a few per cent.
        self.moves: tuple[Callable[[Groups, random.Random], Groups | None], ...] = (
            self.switch,
            self.switch_all,
            self.switch_run,
            self.tune,
            self.merge,
            self.split,
            self.shift,
            self.rebucket,
        )

    def neighbour(self, groups: Groups, draw: random.Random) -> Groups | None:
        """A random neighbour, in issue order."""
        changed = draw.choice(self.moves)(groups, draw)
        return None if changed is None else issue_order(changed, self.parameters)

    def bytes_of(self, group: SyncGroup) -> int:
        """Bytes of the group's members, each in its own dtype."""
        return sum(map(self.bytes_of_piece, group.members))

    def bytes_of_piece(self, member: ParameterSlice) -> int:
        """Bytes of a parameter, or of the slice of it."""
        return piece_bytes((member, self.table[member.name]))

    def place_of(self, member: ParameterSlice) -> tuple[int, int]:
        """Where the member comes in the backward pass, by the completion of its gradient; slices by their rows."""
        return self.table[member.name].ready, member.start or 0

    def kind(self, group: SyncGroup) -> Kind:
        """What the group can be synchronized by, judged by its largest parameter."""
        largest = max(group.members, key=self.bytes_of_piece)
        if largest.name not in self._kinds:
            names = [name for name, options in self.choices.items() if self._follow(options[0], [largest])]
            self._kinds[largest.name] = frozenset([*names, self.table[largest.name].spec.dtype])
        return self._kinds[largest.name]

    def possible(self, choice: Choice, group: SyncGroup) -> bool:
        """Whether the group can be synchronized this way."""
        layer = layer_of(choice.strategy, group.members[0], self.table)
        if layer is not None and layer != {m.name for m in group.members}:
            return False
        return self._follow(choice, group.members)

    def followed(self, choice: Choice, group: SyncGroup) -> list[SyncGroup]:
        """The group, synchronized this way; those members that cannot be in a group of their own, as they were, and
        each layer in one, where the strategy holds layers."""
        if self.possible(choice, group):
            return [choice.of(group)]
        if self.holds_layer(group):
            return [group]
        able: dict[frozenset[str] | None, list[ParameterSlice]] = {}
        for member in group.members:
            if self._follow(choice, [member]):
                able.setdefault(layer_of(choice.strategy, member, self.table), []).append(member)
        parts = [m for layer, m in able.items() if layer is None or layer == {member.name for member in m}]
        taken = {id(member) for members in parts for member in members}
        rest = tuple(member for member in group.members if id(member) not in taken)
        found = [choice.of(group.model_copy(update={"members": tuple(members)})) for members in parts]
        return [*found, *([group.model_copy(update={"members": rest})] if rest else [])]

    def _follow(self, choice: Choice, members: Sequence[ParameterSlice]) -> bool:
        strategy, context = STRATEGIES[choice.strategy], self.problem.context
        if not self.problem.rules.allow(choice.strategy, choice.options, (m.name for m in members)):
            return False
        return all(strategy.applies(Member(m, self.table[m.name]), context) is None for m in members)

    def holds_layer(self, group: SyncGroup) -> bool:
        """Whether the group must hold the parameters that it holds, and no others."""
        return layer_of(group.strategy, group.members[0], self.table) is not None

    def switch(self, groups: Groups, draw: random.Random) -> Groups | None:
        """Another strategy, or other options (another owner, say), for one group."""
        i = draw.randrange(len(groups))
        choice = self._draw_choice(draw)
        return self.switched(groups, i, i + 1, choice)

    def switch_all(self, groups: Groups, draw: random.Random) -> Groups | None:
        """One strategy for all groups that can use it."""
        return self.switched(groups, 0, len(groups), self._draw_choice(draw))

    def switch_run(self, groups: Groups, draw: random.Random) -> Groups | None:
        """One strategy for those of a stretch of groups that can use it: what comes first in the backward pass has
        more time than what comes last."""
        first, last = sorted(draw.choices(range(len(groups)), k=2))
        return self.switched(groups, first, last + 1, self._draw_choice(draw))

    def switched(self, groups: Groups, first: int, end: int, choice: Choice) -> Groups:
        """The same choice for those members of `groups[first:end]` that can use it."""
        run = (part for group in groups[first:end] for part in self.followed(choice, group))
        return (*groups[:first], *run, *groups[end:])

    def tune(self, groups: Groups, draw: random.Random) -> Groups | None:
        """Other options, for those of a stretch of groups that have the strategy of one of them."""
        first, last = sorted(draw.choices(range(len(groups)), k=2))
        strategy = groups[draw.randint(first, last)].strategy
        offered = self.choices.get(strategy, ())
        if len(offered) < 2:
            return None
        choice = draw.choice(offered)
        run = (choice.of(g) if g.strategy == strategy else g for g in groups[first : last + 1])
        return (*groups[:first], *run, *groups[last + 1 :])

    def merge(self, groups: Groups, draw: random.Random) -> Groups | None:
        """Two neighbours become one group."""
        return merged(groups, draw.randrange(len(groups)), self.table)

    def split(self, groups: Groups, draw: random.Random) -> Groups | None:
        """One group becomes two."""
        i = draw.randrange(len(groups))
        members = groups[i].members
        if len(members) < 2 or self.holds_layer(groups[i]):
            return None
        at = draw.randrange(1, len(members))
        parts = (groups[i].model_copy(update={"members": m}) for m in (members[:at], members[at:]))
        return (*groups[:i], *parts, *groups[i + 1 :])

    def shift(self, groups: Groups, draw: random.Random) -> Groups | None:
        """The boundary between two neighbours moves, by up to half of the giving group."""
        i = draw.randrange(len(groups))
        j = following(groups, i, self.table)
        if j is None:
            return None
        left, right = groups[i].members, groups[j].members
        if draw.random() < 0.5:
            k = draw.randint(1, max(1, len(left) // 2))
            left, right = left[:-k], left[-k:] + right
        else:
            k = draw.randint(1, max(1, len(right) // 2))
            left, right = left + right[:k], right[k:]
        if not left or not right:
            return None
        changed = list(groups)
        changed[i] = groups[i].model_copy(update={"members": left})
        changed[j] = groups[j].model_copy(update={"members": right})
        return tuple(changed)

    def rebucket(self, groups: Groups, draw: random.Random) -> Groups | None:
        """All members divided anew into buckets of another size; each keeps its strategy and options."""
        return self.rebucketed(groups, round(max(1, self.bytes_total) * MAX_BUCKETS ** -draw.random()))

    def rebucketed(self, groups: Groups, size: int) -> Groups:
        """All members in buckets of so many bytes or more."""
        layers, single = list[SyncGroup](), list[SyncGroup]()
        for group in groups:
            if self.holds_layer(group):
                layers.append(group)
            else:
                single += (group.model_copy(update={"members": (m,)}) for m in group.members)
        return issue_order((*layers, *fuse(single, self.parameters, size)), self.parameters)

    def _draw_choice(self, draw: random.Random) -> Choice:
        strategy = draw.choice(list(self.choices))
        return draw.choice(self.choices[strategy])


def choices(problem: Problem) -> dict[str, list[Choice]]:
    """What the strategies offer that is not forbidden, within the fidelity that is allowed; by strategy. None of those
    that lose something: a search knows what they save, and not what a loss is worth. Whoever does pins them."""
    found: dict[str, list[Choice]] = {}
    for name, strategy in STRATEGIES.items():
        offered: Sequence[Options] = strategy.options(problem.context)
        for options in _with_rounded(offered) if problem.allows("rounded") else offered:
            label = strategy.fidelity(options)
            if label in ("exact", "rounded") and problem.allows(label) and problem.rules.allow(name, {}, ()):
                found.setdefault(name, []).append(Choice(name, options.model_dump(exclude_defaults=True)))
    return found


def _with_rounded(offered: Sequence[Options]) -> Sequence[Options]:
    """A strategy's options, each followed by the same with bfloat16 on the wire, where the strategy has `wire` and none
    of them narrows it. Searchers that take only the first few thus take both kinds."""
    if any(getattr(options, "wire", None) != "same" for options in offered):
        return offered
    return [o for options in offered for o in (options, options.model_copy(update={"wire": "bfloat16"}))]


def merged(groups: Groups, i: int, table: Mapping[str, Parameter]) -> Groups | None:
    """Group i and its neighbour as one, synchronized as the former; `None` where it has no neighbour."""
    j = following(groups, i, table)
    if j is None:
        return None
    joined = groups[i].model_copy(update={"members": groups[i].members + groups[j].members})
    return (*groups[:i], *groups[i + 1 : j], joined, *groups[j + 1 :])


def following(groups: Groups, i: int, table: Mapping[str, Parameter]) -> int | None:
    """The neighbour of group i: the next one of the same dtype. Groups that hold a layer have none, and are none."""
    free = [layer_of(g.strategy, g.members[0], table) is None for g in groups[i:]]
    dtypes = [table[g.members[0].name].spec.dtype for g in groups[i:]]
    return next((i + k for k in range(1, len(free)) if free[0] and free[k] and dtypes[k] == dtypes[0]), None)


def layer_of(strategy: str, member: ParameterSlice, table: Mapping[str, Parameter]) -> frozenset[str] | None:
    """The parameters that a group of this strategy holds, and no others, if it holds this one; `None` where it may hold
    any."""
    return STRATEGIES[strategy].layer(Member(member, table[member.name]))
