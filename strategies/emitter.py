"""The emitter that a strategy describes itself to: it records operations, and checks that they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.dtypes import WireDtype
from autopar.ops.averages import OwnGradients
from autopar.ops.base import CLIP_STAGE, FORWARD_STAGE, Call, Emission, Operation
from autopar.ops.collectives import AllReduce, AllToAll, Broadcast, Collective, Reduce
from autopar.ops.context import Context
from autopar.ops.exchanges import AllGather, ReduceScatter
from autopar.ops.gradients import Deliver, Pack
from autopar.ops.group import Group, Member
from autopar.ops.layouts import Layout, Partial, Replicate, Varying
from autopar.ops.parts import CountParts, FormGradients, PackParts, touched_elements
from autopar.ops.servers import ServerReduce
from autopar.ops.state import Keep, State
from autopar.ops.subgroups import Subgroups
from autopar.ops.updates import Free, Store, Update
from autopar.ops.waits import Wait


class Emitter:
    """Records the calls of a step. With one rank, collectives and waits vanish."""

    def __init__(self, context: Context, end: int = 0) -> None:
        self.context = context
        self.end = end
        """Position of the last node in the graph's compute."""
        self.world_size = context.world_size
        self.calls: list[Call] = []

    def emit(
        self,
        op: Operation,
        group: Group,
        inputs: Sequence[Call] = (),
        *,
        position: int | None = None,
        stage: int | None = None,
    ) -> Call:
        """Records an operation on the values of earlier ones. It runs behind `position` in the graph's compute, or, by
        default, as soon as its inputs are there."""
        assert not any(i.is_pending for i in inputs), f"'{op.name}' needs values that were waited for"
        if stage is None:
            stage = inputs[0].stage if inputs and position is None else 0
        return self._record(op, group, tuple(inputs), stage, position)

    def pack(self, group: Group, wire: WireDtype = "same") -> Call:
        """The group's gradients as one flat value in the `wire` dtype: of this rank's batch, scaled so that the
        sum over ranks is the mean over the global batch. Complex numbers are sent as they are."""
        return self.emit(Pack(self.sent_as(group, wire)), group)

    def sent_as(self, group: Group, wire: WireDtype) -> str:
        """The dtype in which a group's gradients are sent."""
        as_it_is = wire == "same" or self.world_size == 1 or group.dtype.startswith("complex")  # of no narrower kind
        return group.dtype if as_it_is else wire

    def state(
        self, group: Group, key: str, *, layout: Layout, elements: int | None = None, dtype: str | None = None
    ) -> Call:
        """A tensor that lives from step to step, under a name within its group; by default of as many elements as the
        group has, in its dtype. Zeros at first. `layout` says what it is to the other ranks (`ops.state.State`)."""
        of = group.elements if elements is None else elements
        return self.emit(State(key, of, dtype or group.dtype, layout), group, position=-1)

    def keep(self, state: Call, value: Call) -> None:
        """Writes a value into a state, for the next step; behind what was emitted so far."""
        self.emit(Keep(), value.owner_group, [state, value], stage=value.stage)

    def all_reduce(self, value: Call, subgroups: Subgroups = ()) -> Call:
        """The sum over ranks, on every rank; of a sharded value, of the part that all ranks of a subgroup hold."""
        return self.collective(AllReduce(subgroups, _communicator(value)), value)

    def reduce(self, value: Call, owner: int) -> Call:
        """The sum over ranks, on `owner`."""
        return self.collective(Reduce((), _communicator(value), owner), value)

    def reduce_scatter(self, value: Call, sizes: Sequence[int], subgroups: Subgroups = ()) -> Call:
        """The sum over ranks; rank r holds the part `sizes[r]` elements long (0 is allowed), in the order of ranks."""
        return self.collective(ReduceScatter(subgroups, _communicator(value), tuple(sizes)), value)

    def all_gather(self, value: Call, subgroups: Subgroups = (), communicator: int | None = None) -> Call:
        """All parts of a sharded value, on every rank. `communicator`: by default that of its stage."""
        return self.collective(
            AllGather(subgroups, _communicator(value) if communicator is None else communicator), value
        )

    def all_to_all(self, value: Call) -> Call:
        """What each rank has for every other one, of a value that is each rank's own; as much again is expected."""
        return self.collective(AllToAll((), _communicator(value)), value)

    def broadcast(self, value: Call) -> Call:
        """The owner's value, on every rank."""
        return self.collective(Broadcast((), _communicator(value)), value)

    def server_reduce(self, value: Call, summed_by: Sequence[int]) -> Call:
        """The sum over ranks, on every rank. Rank r adds up `summed_by[r]` elements and sends them to the others;
        behind the ranks' entries are those of the serving hosts."""
        return self.collective(ServerReduce((), _communicator(value), tuple(summed_by)), value)

    def collective(self, op: Collective, value: Call) -> Call:
        """Begins a collective; with one rank, the value itself."""
        assert not value.is_pending, f"{op.name} of a value that was not waited for"
        if self.world_size == 1:
            return value
        value = self._replaced(value, value.with_op(value.op.when_sent()))
        return self._record(op, value.group, (value,), value.stage, value.position)

    def wait(self, value: Call, position: int | None = None) -> Call:
        """Completes a collective. Its wait lies after the backward pass, so that compute hides it; that of counts,
        before it; or behind a position in the graph."""
        if not value.is_pending:
            return value
        stage = value.stage + (position is None)
        return self._record(Wait(), value.group, (value,), stage, position, value.deferred)

    def free(self, value: Call, elements: int, position: int) -> None:
        """Nobody reads so many of a value's elements behind a position."""
        assert not value.is_pending and isinstance(value.layout, Replicate), "only a rank's own copy can be freed"
        if self.world_size > 1:
            self.emit(Free(elements), value.owner_group, [value], position=position)

    def gathered(self, group: Group, wire: WireDtype = "same") -> Call:
        """The gradients, formed from the parts of all ranks. With one rank, they are there already."""
        if self.world_size == 1:
            return self.pack(group)
        counts = self.wait(self.all_gather(self.emit(CountParts(), group, stage=FORWARD_STAGE)))
        dtype = group.dtype if wire == "same" else wire
        parts = self.wait(self.all_gather(self.emit(PackParts(dtype), group, [counts], stage=0)))
        touched = touched_elements(group, [self.passes_over(m) for m in group.members], self.world_size)
        return self.emit(FormGradients(touched), group, [parts, counts])

    def passes_over(self, member: Member) -> bool:
        """Whether the optimizer can be given the rows of a table that were looked up, and no others."""
        structure = member.parameter.parts
        rows = structure is not None and member.slice.whole and structure.kind == "rows"
        return self.context.sparse_update and not self.context.clips and rows

    def update(self, value: Call, group: Group, *, keeps_shards: bool = False, position: int | None = None) -> Call:
        """Runs the optimizer on what this rank holds of the gradients, each in the parameter's own dtype; without
        an optimizer, hands the gradients over. Returns the updated parameters, in the same layout.

        `keeps_shards`: the parameters' rows live with the rank that updates them, and nowhere else. `position`: where
        in the graph it may happen, unless gradients are clipped first.
        """
        assert not value.is_pending and not isinstance(value.layout, Partial | Varying), (
            "update needs gradients that were summed over all ranks, and waited for"
        )
        clips = self.context.clips
        stage = max(value.stage, CLIP_STAGE) if clips else value.stage
        if self.context.has_optimizer:
            op: Operation = Update(keeps_shards, value.op.touched)
        else:
            assert isinstance(value.layout, Replicate), "without an optimizer, every rank needs the whole gradient"
            op = Deliver()
        return self._record(op, group, (value,), stage, None if clips else position)

    def update_alone(self, group: Group) -> Call:
        """Runs the optimizer on each rank with that rank's gradients alone: replicas come to differ."""
        own = self.emit(OwnGradients(), group)
        return self._record(Update(), group, (own,), CLIP_STAGE if self.context.clips else 0, None)

    def store(self, value: Call, group: Group, *, deferred: bool = False) -> None:
        """Writes updated parameters that are being received into the parameters of every rank. `deferred`: in the next
        step's forward pass, before it reads the first of them."""
        if self.world_size == 1:
            return
        assert value.is_pending and isinstance(value.layout, Replicate), "store waits for replicated parameters itself"
        position = None
        if deferred:
            assert self.context.late_parameters, "parameters may be late only where that is allowed"
            value = self._replaced(value, replace(value, deferred=True))
            position = group.first_use - 1
        store = Store(value.op.sender(value))
        value = self.wait(value, position)
        self._record(store, group, (value,), value.stage, position, deferred)

    def _replaced(self, before: Call, after: Call) -> Call:
        """Changes a call that nobody has used yet."""
        if after is not before:
            self.calls[before.index] = after
        return after

    def _record(
        self,
        op: Operation,
        group: Group | None,
        inputs: tuple[Call, ...],
        stage: int,
        position: int | None,
        deferred: bool = False,
    ) -> Call:
        made = op.value(Emission(group, inputs, self.context))
        self.calls.append(Call(len(self.calls), op, inputs, group, made, stage, position, deferred))
        return self.calls[-1]


def _communicator(value: Call) -> int:
    """What is sent behind the backward pass does not wait for what is sent beside it."""
    return int(value.stage > 0)
