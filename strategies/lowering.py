"""Lowers a plan: asks each group's strategy to emit its primitives, and puts them in one fixed order.

The order is the same on every rank, whatever the batch: collectives are issued in the order of the plan's
groups, each as soon as its gradients are complete and the one before it has been issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TypeVar

from pydantic import ValidationError

from autopar.errors import PlanError, did_you_mean
from autopar.ir.primitives import (
    CLIP_STAGE,
    COLLECTIVES,
    FORWARD_STAGE,
    GATHERED,
    WHOLE_STEP,
    Kind,
    Primitive,
    order_hash,
)
from autopar.ir.training_graph import Head, Layer, TrainingGraph
from autopar.spec.plan import SyncGroup
from autopar.spec.validation import explain
from autopar.strategies import strategy_named
from autopar.strategies.base import Context, Group, Member, Options, Strategy
from autopar.strategies.emitter import Emitter

T = TypeVar("T")
Known = dict[int, tuple[SyncGroup, int, T]]
"""By the identity of a group's object, which is kept with it, as is the number of its primitives."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A primitive, and the position in the graph's compute behind which it runs (-1: before everything)."""

    primitive: Primitive
    position: int


@dataclass(frozen=True)
class StepProgram:
    """One training step: the graph's compute, and the primitives placed between it."""

    context: Context
    groups: tuple[Group, ...]
    primitives: tuple[Primitive, ...]
    """As recorded; `Primitive.index` and `inputs` refer to this tuple."""
    placed: tuple[Placed, ...]
    """In execution order."""

    @cached_property
    def replaced(self) -> frozenset[str]:
        """Nodes of the graph that are not computed: gradients whose parts are sent instead."""
        of_parts = [self.groups[p.group] for p in self.primitives if p.kind is Kind.PARTS]
        of_tables = [m.parameter.table for m in self._working_on("rows")]
        return frozenset(
            [name for g in of_parts for m in g.members for name in m.parts.replaced]
            + [name for head in self._heads for name in head.replaced]
            + [name for table in of_tables if table is not None for name in table.parts.replaced]
            + [name for layer in self._layers for name in layer.replaced]
        )

    @cached_property
    def handed(self) -> frozenset[str]:
        """Of these, nodes whose values a strategy makes in another way."""
        made = [head.hidden_gradient for head in self._heads]
        made += [name for layer in self._layers for name in (layer.product, layer.given_gradient)]
        return frozenset(name for name in made if name is not None)

    @cached_property
    def resident(self) -> frozenset[int]:
        """Groups whose parameters' rows live on one rank each."""
        return frozenset(p.group for p in self.primitives if p.resident)

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Parameters whose rows live on one rank each, and are gathered for each pass that reads them."""
        groups = {p.group for p in self.primitives if p.work.startswith(GATHERED)}
        return frozenset(m.slice.name for g in groups for m in self.groups[g].members)

    @property
    def _heads(self) -> list[Head]:
        return [m.parameter.head for m in self._working_on("head") if m.parameter.head is not None]

    @property
    def _layers(self) -> list[Layer]:
        return [m.parameter.layer for m in self._working_on("layer") if m.parameter.layer is not None]

    @cached_property
    def sent(self) -> frozenset[int]:
        """Indices of the values that collectives take."""
        return frozenset(i for p in self.primitives if p.kind in COLLECTIVES for i in p.inputs)

    def _working_on(self, what: str) -> list[Member]:
        """Members of groups with a strategy's own works on heads, layers, or rows of tables."""
        groups = {p.group for p in self.primitives if p.work.partition(".")[0] == what}
        return [m for g in sorted(groups) for m in self.groups[g].members]

    @property
    def resident_members(self) -> tuple[Member, ...]:
        """Of those groups, in the order of the plan."""
        return tuple(m for g in sorted(self.resident) for m in self.groups[g].members)

    def of_groups(self, known: Known[T], make: Callable[[Group, Sequence[Primitive]], T]) -> list[tuple[int, T]]:
        """The index of each group's first primitive, and `make` of the group and its primitives, in order. `make` must
        depend on them and on the context alone, and on no index but relative to the group's first: it is remembered in
        `known` by the group's object, which plans of a search share."""
        found: list[tuple[int, T]] = []
        first = 0
        for group in self.groups:
            entry = known.get(id(group.spec))
            if entry is None:
                own = [*takewhile(lambda p, i=group.index: p.group == i, self.primitives[first:])]  # type: ignore[misc]
                entry = known[id(group.spec)] = group.spec, len(own), make(group, own)
            found.append((first, entry[2]))
            first += entry[1]
        return found

    def each(self, known: Known[tuple[T, ...]], make: Callable[[Primitive], T]) -> list[T]:
        """`make` of each primitive, in order; those of groups are remembered as by `of_groups`."""
        found = [of_one for _, made in self.of_groups(known, lambda _, own: tuple(map(make, own))) for of_one in made]
        found += map(make, self.primitives[len(found) :])
        return found

    @property
    def order_hash(self) -> str:
        """What all ranks must agree on before the first step."""
        return order_hash(tuple(p.primitive for p in self.placed), self.context.world_size)


def lower_plan(groups: Sequence[SyncGroup], graph: TrainingGraph, context: Context) -> StepProgram:
    """Lowers sync groups for one training graph; raises `PlanError` where a strategy cannot be used."""
    emit = Emitter(context, len(graph.compute) - 1)
    resolved = []
    for index, spec in enumerate(groups):
        strategy = strategy_named(spec.strategy)
        options = check_options(strategy, spec, context)
        group = resolve(index, spec, graph)
        for member in group.members:
            reason = strategy.applies(member, context)
            if reason is None and not member.slice.whole and not context.elementwise_update:
                reason = "the optimizer's update is not elementwise, so it cannot run on a slice"
            if reason is not None:
                raise PlanError(f"group {index}: '{member.slice}' cannot use {spec.strategy}: {reason}")
        strategy.lower(group, options, emit)
        resolved.append(group)
    primitives = emit.primitives
    if context.clips:
        primitives.append(_clip(primitives))
    bookends = _weight_and_loss(len(primitives), graph, context) if context.world_size > 1 else ()
    placed = _place(primitives, resolved, graph, context)
    # The weights' sum goes first: with several micro-batches it is known, and sent, before the first of them.
    placed = sorted([*bookends[:1], *placed, *bookends[1:]], key=lambda p: p.position)
    return StepProgram(
        context=context,
        groups=tuple(resolved),
        primitives=(*primitives, *(b.primitive for b in bookends)),
        placed=tuple(placed),
    )


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


def check_options(strategy: Strategy, spec: SyncGroup, context: Context) -> Options:
    """Reads a group's options; raises `PlanError` with the nearest name for an unknown one."""
    known = strategy.options_type.model_fields
    for key in spec.options:
        if key not in known:
            raise PlanError(
                f"{strategy.name} has no option '{key}'{did_you_mean(key, known)} known: {', '.join(known) or 'none'}"
            )
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


def _clip(primitives: Sequence[Primitive]) -> Primitive:
    sources = tuple(p.inputs[0] for p in primitives if p.kind in (Kind.UPDATE, Kind.DELIVER))
    return Primitive(len(primitives), Kind.CLIP, WHOLE_STEP, sources, 1, "float64", stage=CLIP_STAGE - 1)


def _weight_and_loss(first: int, graph: TrainingGraph, context: Context) -> tuple[Placed, ...]:
    """The small sums of every step: the batch weights, before the backward pass, and the loss, after it. A program
    without an optimizer begins with the backward pass, and leaves the loss to the user."""
    start, end = graph.backward_start - 1, len(graph.compute) - 1

    def one(i: int, kind: Kind, source: tuple[int, ...], stage: int) -> Primitive:
        return Primitive(first + i, kind, WHOLE_STEP, source, 1, "float64", stage)

    weight = (
        Placed(one(0, Kind.ALL_REDUCE, (), 0), -1 if context.has_optimizer else start),
        Placed(one(1, Kind.WAIT, (first,), 0), start),
    )
    if not context.has_optimizer:
        return weight
    return (
        *weight,
        Placed(one(2, Kind.ALL_REDUCE, (), 0), start),
        Placed(one(3, Kind.WAIT, (first + 2,), 1), end),
    )


def _place(
    primitives: Sequence[Primitive], groups: Sequence[Group], graph: TrainingGraph, context: Context
) -> list[Placed]:
    start, end = graph.backward_start - 1, len(graph.compute) - 1
    # A program without an optimizer has no part in the forward pass.
    issued, early = -1, -1 if context.has_optimizer else start
    placed: list[Placed] = []
    last: dict[int, Placed] = {}
    """What has time until the end: sums whose gradients are complete only there are issued first."""
    at: dict[int, int] = {}
    for p in primitives:
        if p.position is not None:
            # Not before what it needs, which the order of groups may have put behind that position.
            of_step_before = p.late and p.kind in (Kind.WAIT, Kind.STORE)
            needed = -1 if of_step_before else max((at[i] for i in p.inputs if i in at), default=-1)
            at[p.index] = min(max(p.position, needed), end)
            if at[p.index] == end:
                last[p.index] = Placed(p, end)
            else:
                placed.append(Placed(p, at[p.index]))
            continue
        if p.stage > 0 or p.kind is Kind.CLIP:
            continue
        group = groups[p.group]
        if p.stage < 0:
            early = max(early, group.known)
            placed.append(Placed(p, early if p.stage == FORWARD_STAGE else start))
            continue
        if p.kind in (Kind.UPDATE, Kind.DELIVER, Kind.STORE):
            made = max((at[i] for i in p.inputs if i in at), default=-1)
            position = max(made, group.ready, *(m.parameter.last_use for m in group.members))
        elif context.world_size == 1:
            position = group.ready
        else:
            position = issued = max(issued, group.ready)
        at[p.index] = position
        if any(i in last for i in p.inputs):
            last[p.index] = Placed(p, end)
        else:
            placed.append(Placed(p, position))
    behind = sorted((p for p in primitives if p.stage > 0 and p.position is None), key=lambda p: _turn(p, groups))
    return [*placed, *last.values(), *(Placed(p, end) for p in behind)]


def _turn(p: Primitive, groups: Sequence[Group]) -> tuple[int, ...]:
    """Sorts what lies behind the backward pass: group by group, as their sums come in. What the next step waits for
    goes last, in the order in which it is needed."""
    return (p.stage, p.late, groups[p.group].first_use if p.late else 0, p.group, p.index)
