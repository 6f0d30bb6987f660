"""Lowers a plan: asks each group's strategy to emit its operations, and has them put in one fixed order.

The order is the same on every rank, whatever the batch (`autopar.strategies.schedule`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, takewhile
from typing import TypeVar

from pydantic import ValidationError

from autopar.errors import PlanError, among
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.base import Call
from autopar.ops.collectives import collective_of
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.moments import Moment
from autopar.ops.values import Value
from autopar.ops.waits import StepSum, StepWait
from autopar.spec.plan import FIDELITIES, Fidelity, SyncGroup
from autopar.spec.validation import explain
from autopar.strategies import strategy_named
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter
from autopar.strategies.schedule import Placed, schedule
from autopar.strategies.timing import Moments, check_timing, fullest, group_fidelity, lower_group

T = TypeVar("T")
Known = dict[tuple[int, Moment], tuple[SyncGroup, int, T]]
"""By the identity of a group's object, which is kept with it, as is the number of its calls; and by what it does."""


@dataclass(frozen=True)
class StepProgram:
    """One training step: the graph's compute, and the calls placed between it."""

    context: Context
    groups: tuple[Group, ...]
    calls: tuple[Call, ...]
    """As recorded; `Call.index` refers to this tuple."""
    placed: tuple[Placed, ...]
    """In execution order."""

    @cached_property
    def moments(self) -> Moments:
        """What each group does in this step."""
        return tuple(g.moment for g in self.groups)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices of the placed calls, in execution order."""
        return tuple([call.index for call, _ in self.placed])

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Of the placed calls, in execution order: the position in the graph's compute behind which each runs."""
        return tuple([position for _, position in self.placed])

    @cached_property
    def replaced(self) -> frozenset[str]:
        """Nodes of the graph that are not computed: what is sent, or computed by other ranks, in their place."""
        return frozenset(name for c in self.calls if c.group is not None for name in c.op.replaces(c.group))

    @cached_property
    def handed(self) -> frozenset[str]:
        """Of these, nodes whose values operations make in another way."""
        return frozenset(name for c in self.calls if c.group is not None for name in c.op.makes(c.group))

    @cached_property
    def sharded(self) -> frozenset[int]:
        """Groups whose parameters' rows live on one rank each."""
        return frozenset(c.group.index for c in self.calls if c.group is not None and c.op.keeps_shards)

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Parameters whose rows live on one rank each, and are gathered for each pass that reads them."""
        return frozenset(name for c in self.calls if c.group is not None for name in c.op.gathers(c.group))

    @property
    def sharded_members(self) -> tuple[Member, ...]:
        """Of the groups whose rows live on one rank each, in the order of the plan."""
        return tuple(m for g in sorted(self.sharded) for m in self.groups[g].members)

    def of_groups(self, known: Known[T], make: Callable[[Group, Sequence[Call]], T]) -> list[tuple[int, T]]:
        """The index of each group's first call, and `make` of the group and its calls, in order. `make` must
        depend on them and on the context alone, and on no index but relative to the group's first: it is remembered in
        `known` by the group's object, which plans of a search share."""
        found: list[tuple[int, T]] = []
        first = 0
        for group in self.groups:
            key = id(group.spec), group.moment
            entry = known.get(key)
            if entry is None:
                own = [*takewhile(lambda c, g=group: c.group is g, self.calls[first:])]  # type: ignore[misc]
                entry = known[key] = group.spec, len(own), make(group, own)
            found.append((first, entry[2]))
            first += entry[1]
        return found

    def each(
        self, known: Known[tuple[T, ...]], make: Callable[[Group | None, Sequence[Call]], tuple[T, ...]]
    ) -> list[T]:
        """What `make` makes of each call, in order, given those of a group, or those of none; of groups it is
        remembered as by `of_groups`."""
        found = [*chain.from_iterable([made for _, made in self.of_groups(known, make)])]
        found += make(None, self.calls[len(found) :])
        return found

    @cached_property
    def order_hash(self) -> str:
        """A hash over the collectives in issue order: what all ranks must agree on before the first step."""
        lines = [collective_of(p.call).order_line(p.call) for p in self.placed if p.call.is_pending]
        return hashlib.sha256("\n".join([str(self.context.world_size), *lines]).encode()).hexdigest()[:16]


def lower_plan(
    groups: Sequence[SyncGroup], graph: TrainingGraph, context: Context, moments: Moments | None = None
) -> StepProgram:
    """Lowers sync groups for one training graph: a step in which groups do what `moments` say; by default, all
    synchronize. Raises `PlanError` where a strategy cannot be used."""
    check_timing(groups, context)
    emit = Emitter(context, graph.backward_start - 1, len(graph.compute) - 1)
    resolved = []
    for index, (spec, moment) in enumerate(zip(groups, moments or fullest(groups), strict=True)):
        strategy = strategy_named(spec.strategy)
        options = check_options(strategy, spec, context)
        label = "exact" if moment.doing == "plain" and not strategy.warms_up else strategy.fidelity(options)
        group = replace(resolve(index, spec, graph), moment=moment, label=label)
        for member in group.members:
            reason = strategy.applies(member, context)
            if reason is None and not member.slice.whole and not context.elementwise_update:
                reason = "the optimizer's update is not elementwise, so it cannot run on a slice"
            if reason is not None:
                raise PlanError(f"group {index}: '{member.slice}' cannot use {spec.strategy}: {reason}")
        _check_layer(strategy, group, context)
        lower_group(strategy, group, options, emit)
        resolved.append(group)
    calls = emit.finish()
    if context.world_size > 1:
        calls += _weight_and_loss(len(calls), graph, context)
    return StepProgram(context, tuple(resolved), tuple(calls), tuple(schedule(calls, graph, context)))


def resolve(index: int, spec: SyncGroup, graph: TrainingGraph) -> Group:
    """Looks a group's parameters up; raises `PlanError` where one is missing or the dtypes differ."""
    table = graph.by_name
    members = []
    for piece in spec.members:
        if piece.name not in table:
            raise PlanError(f"group {index}: the model has no trainable parameter '{piece.name}'")
        members.append(Member(piece, table[piece.name]))
    dtypes = {m.parameter.spec.dtype for m in members}
    if len(dtypes) > 1:
        raise PlanError(f"group {index}: parameters of different dtypes ({', '.join(sorted(dtypes))}) in one group")
    return Group(index, spec, tuple(members))


def _check_layer(strategy: Strategy, group: Group, context: Context) -> None:
    names = {m.slice.name for m in group.members}
    needed = strategy.layer(group.members[0])
    if context.world_size > 1 and needed is not None and names != needed:
        raise PlanError(
            f"group {group.index}: {strategy.name} holds one layer's parameters, and no others: "
            f"{' and '.join(sorted(needed))}, not {', '.join(sorted(names))}"
        )


def check_options(strategy: Strategy, spec: SyncGroup, context: Context) -> Options:
    """Reads a group's options; raises `PlanError` with the nearest name for an unknown one."""
    known = strategy.options_type.model_fields
    for key in spec.options:
        if key not in known:
            raise PlanError(f"{strategy.name} has no option '{key}'{among(key, known)}")
    try:
        options = strategy.options_type.model_validate(spec.options)
    except ValidationError as e:
        raise PlanError(explain(e, strategy.options_type, f"options of {strategy.name}")) from e
    if getattr(options, "late", False) and not context.late_parameters:
        raise PlanError(
            f"{strategy.name} leaves parameters on their way between steps, which is not allowed here: pass "
            "late_parameters=True, and read parameters behind program.synchronize()"
        )
    owner = getattr(options, "owner", None)
    if owner is not None and owner >= context.world_size:
        raise PlanError(f"{strategy.name}: owner is rank {owner}, there are {context.world_size} ranks")
    shares = getattr(options, "shares", ())
    if shares and len(shares) != context.world_size:
        raise PlanError(f"{strategy.name}: {len(shares)} shares for {context.world_size} ranks")
    return options


def fidelity_of(groups: Sequence[SyncGroup], context: Context) -> Fidelity:
    """The loosest promise among the groups: by their strategies, and by when they synchronize."""
    found: set[Fidelity] = {"exact"}
    for group in groups:
        strategy = strategy_named(group.strategy)
        found.add(group_fidelity(group, strategy, check_options(strategy, group, context)))
    return max(found, key=FIDELITIES.index)


def rounded_forward(groups: Iterable[SyncGroup]) -> str:
    """The coarsest 16-bit format of the wire in which the forward pass gets some of what it reads, as `bfloat16`; empty
    where it gets all as it is."""
    wires = {g.options.get("wire") for g in groups if strategy_named(g.strategy).rounds_forward}
    return next((w for w in ("bfloat16", "float16") if w in wires), "")


def _weight_and_loss(first: int, graph: TrainingGraph, context: Context) -> list[Call]:
    """The small sums of every step: the batch weights, before the backward pass, and the loss, after it. A program
    without an optimizer begins with the backward pass, and leaves the loss to the user."""
    start, end = graph.backward_start - 1, len(graph.compute) - 1
    number = Value(1, "float64")

    def both(index: int, of: str, begun: int, ended: int) -> list[Call]:
        begin = Call(index, StepSum(of=of), (), None, number, by=begun)
        return [begin, Call(index + 1, StepWait(), (begin,), None, number, by=ended)]

    weight = both(first, "weight", -1 if context.has_optimizer else start, start)
    return [*weight, *both(first + 2, "loss", start, end)] if context.has_optimizer else weight
