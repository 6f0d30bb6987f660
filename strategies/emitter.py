"""The emitter that a strategy describes itself to: it records operations, and checks that they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.dtypes import WireDtype
from autopar.ops.averages import OwnGradients
from autopar.ops.base import Call, Emission, Operation
from autopar.ops.collectives import AllReduce, AllToAll, Broadcast, Collective, Reduce
from autopar.ops.context import Context
from autopar.ops.exchanges import AllGather, ReduceScatter
from autopar.ops.gradients import Clip, Deliver, Pack
from autopar.ops.group import Group, Member
from autopar.ops.layouts import Layout, Partial, Replicate, Varying, own_parts
from autopar.ops.parts import CountParts, FormGradients, PackParts, touched_elements
from autopar.ops.servers import ServerReduce
from autopar.ops.state import Keep, State
from autopar.ops.subgroups import Subgroups
from autopar.ops.updates import Free, Store, Update
from autopar.ops.waits import Wait


class Emitter:
    """Records the calls of a step, and what each needs; `autopar.strategies.schedule` decides when they run. With one
    rank, collectives and waits vanish.

    Where a strategy chooses a moment, it says a deadline, `by`: a position in the graph's compute, behind which a call
    runs, unless what it needs is there only later.
    """

    def __init__(self, context: Context, start: int = -1, end: int = 0) -> None:
        self.context = context
        self.start = start
        """Position of the last node of the forward pass in the graph's compute."""
        self.end = end
        """Position of the last node in the graph's compute."""
        self.world_size = context.world_size
        self.calls: list[Call] = []
        self._clip: Call | None = None

    def emit(self, op: Operation, group: Group, inputs: Sequence[Call] = (), *, by: int | None = None) -> Call:
        """Records an operation on the values of earlier ones. It runs as soon as these are there, and what it reads of
        the graph (`Operation.behind`); with `by`, not before that position."""
        assert not any(i.is_pending for i in inputs), f"'{op.name}' needs values that were waited for"
        return self._record(op, group, tuple(inputs), by)

    def pack(self, group: Group, wire: WireDtype = "same") -> Call:
        """The group's gradients as one flat value in the `wire` dtype: of this rank's batch, scaled so that the
        sum over ranks is the mean over the global batch. Complex numbers are sent as they are."""
        return self.emit(Pack(self.sent_as(group, wire)), group)

    def sent_as(self, group: Group, wire: WireDtype) -> str:
        """The dtype in which a group's gradients are sent, for the option `wire`."""
        as_it_is = wire == "same" or self.world_size == 1 or group.dtype.startswith("complex")  # of no narrower kind
        return group.dtype if as_it_is else wire

    def state(
        self,
        group: Group,
        key: str,
        *,
        layout: Layout | None = None,
        elements: int | None = None,
        dtype: str | None = None,
        momentum: float | None = None,
        of_parameters: bool = False,
    ) -> Call:
        """A tensor that lives from step to step, under a name within its group; by default of as many elements as the
        group has, in its dtype. Zeros at first. `layout` says what it is to the other ranks (`ops.state.State`); by
        default, each rank has a part of its own of a sum, as a residual is. `momentum`: of one, which part of it each
        step adds to the gradients, so that it is no residual. `of_parameters`: it is what parameters lack of what they
        should be, and no gradient."""
        of = group.elements if elements is None else elements
        kept = State(key, of, dtype or group.dtype, layout or own_parts(self.world_size), momentum, of_parameters)
        return self.emit(kept, group)

    def keep(self, state: Call, value: Call) -> None:
        """Writes a value into a state, for the next step; behind all that was emitted so far and reads the state."""
        readers = [c for c in self.calls if state in c.inputs and c is not value]
        self.emit(Keep(), value.owner_group, [state, value, *readers])

    def all_reduce(self, value: Call, subgroups: Subgroups = ()) -> Call:
        """The sum over ranks, on every rank; of a sharded value, of the part that all ranks of a subgroup hold."""
        return self.collective(AllReduce(subgroups), value)

    def reduce(self, value: Call, owner: int) -> Call:
        """The sum of a value over ranks, on rank `owner` alone."""
        return self.collective(Reduce(owner=owner), value)

    def reduce_scatter(self, value: Call, sizes: Sequence[int], subgroups: Subgroups = ()) -> Call:
        """The sum over ranks; rank r holds the part `sizes[r]` elements long (0 is allowed), in the order of ranks."""
        return self.collective(ReduceScatter(subgroups, tuple(sizes)), value)

    def all_gather(self, value: Call, subgroups: Subgroups = ()) -> Call:
        """The whole of a sharded value, on every rank."""
        return self.collective(AllGather(subgroups), value)

    def all_to_all(self, value: Call) -> Call:
        """What each rank has for every other one, of a value that is each rank's own; as much again is expected."""
        return self.collective(AllToAll(), value)

    def broadcast(self, value: Call) -> Call:
        """The value that one rank owns, on every rank."""
        return self.collective(Broadcast(), value)

    def server_reduce(self, value: Call, summed_by: Sequence[int]) -> Call:
        """The sum over ranks, on every rank. Rank r adds up `summed_by[r]` elements and sends them to the others;
        behind the ranks' entries are those of the serving hosts."""
        return self.collective(ServerReduce(summed_by=tuple(summed_by)), value)

    def collective(self, op: Collective, value: Call) -> Call:
        """Begins a collective operation `op` on a value, to be completed by `wait`. With one rank, returns the value
        itself."""
        assert not value.is_pending, f"{op.name} of a value that was not waited for"
        if self.world_size == 1:
            return value
        value = self.as_sent(value)
        return self._record(op, value.group, (value,))

    def as_sent(self, value: Call) -> Call:
        """The call's value as a collective takes it: flat, in contiguous memory. Only of a call that no other call has
        taken yet."""
        when_sent = value.op.when_sent()
        return value if when_sent is value.op else self._replaced(value, replace(value, op=when_sent))

    def wait(self, value: Call, *, by: int | None = None) -> Call:
        """Completes a collective, as late as its value is needed, so that compute hides it: by the first node of the
        graph that reads what is made of it, or else behind the backward pass; or by a position that is said."""
        if not value.is_pending:
            return value
        return self._record(Wait(), value.group, (value,), by, value.deferred)

    def free(self, value: Call, elements: int, by: int) -> None:
        """Frees `elements` elements of `value` behind position `by` of the graph's compute."""
        assert not value.is_pending and isinstance(value.layout, Replicate), "only a rank's own copy can be freed"
        if self.world_size > 1:
            self.emit(Free(elements), value.owner_group, [value], by=by)

    def gathered(self, group: Group, wire: WireDtype = "same") -> Call:
        """The group's gradients, formed on every rank from the parts of all ranks; with one rank, the rank's own."""
        if self.world_size == 1:
            return self.pack(group)
        counts = self.wait(self.all_gather(self.emit(CountParts(), group)), by=self.start)
        dtype = group.dtype if wire == "same" else wire
        parts = self.wait(self.all_gather(self.emit(PackParts(dtype), group, [counts])))
        touched = touched_elements(group, [self.passes_over(m) for m in group.members], self.world_size)
        return self.emit(FormGradients(touched), group, [parts, counts])

    def passes_over(self, member: Member) -> bool:
        """Whether the optimizer can be given the rows of a table that were looked up, and no others."""
        structure = member.parameter.parts
        rows = structure is not None and member.slice.whole and structure.kind == "rows"
        return self.context.sparse_update and not self.context.clips and rows

    def update(self, value: Call, group: Group, *, keeps_shards: bool = False, op: Operation | None = None) -> Call:
        """Runs the optimizer on what this rank holds of the gradients, each in the parameter's own dtype, once the
        clipping coefficient is known where gradients are clipped; without an optimizer, hands the gradients over.
        Returns the updated parameters, in the same layout.

        `keeps_shards`: the parameters' rows live with the rank that updates them, and nowhere else. `op`: what updates
        in place of the optimizer's own step.
        """
        assert not value.is_pending and not isinstance(value.layout, Partial | Varying), (
            "update needs gradients that were summed over all ranks, and waited for"
        )
        if self.context.has_optimizer:
            op = op or Update(keeps_shards, value.op.touched)
        else:
            assert isinstance(value.layout, Replicate), "without an optimizer, every rank needs the whole gradient"
            op = Deliver()
        return self._record(op, group, (value, self._coefficient()) if self.context.clips else (value,))

    def update_alone(self, group: Group, *given: Call, op: Operation | None = None) -> Call:
        """Runs the optimizer on each rank with that rank's gradients alone: replicas come to differ. `op`: what updates
        in place of the optimizer's own step, from `given`, the first of which is these gradients."""
        inputs = given or (self.own_gradients(group),)
        clip = (self._coefficient(),) if self.context.clips else ()
        return self._record(op or Update(), group, (*inputs, *clip))

    def own_gradients(self, group: Group) -> Call:
        """This rank's own gradients, to update with as if all ranks had such."""
        return self.emit(OwnGradients(), group)

    def store(self, value: Call, group: Group, *, deferred: bool = False) -> None:
        """Writes updated parameters that are being received into the parameters of every rank. `deferred`: in the next
        step's forward pass, before it reads the first of them."""
        if self.world_size == 1:
            return
        assert value.is_pending and isinstance(value.layout, Replicate), "store waits for replicated parameters itself"
        if deferred:
            assert self.context.late_parameters, "parameters may be late only where that is allowed"
            value = self._replaced(value, replace(value, deferred=True))
        store = Store(value.op.sender(value))
        self._record(store, group, (self.wait(value),), deferred=deferred)

    def finish(self) -> list[Call]:
        """All recorded calls, once every group has emitted its own. Where gradients are clipped, the last call forms
        the clipping coefficient from all groups' gradients."""
        if self._clip is not None:
            self._clip.index = len(self.calls)
            self._clip.inputs = tuple(c.inputs[0] for c in self.calls if c.op.takes_clip)
            self.calls.append(self._clip)
            self._clip = None
        return self.calls

    def _coefficient(self) -> Call:
        """The clipping coefficient: it is an input of updates before all that it is formed of is recorded."""
        if self._clip is None:
            self._clip = Call(-1, Clip(), (), None, Clip().value(Emission(None, (), self.context)))
        return self._clip

    def _replaced(self, before: Call, after: Call) -> Call:
        """Changes a call that nobody has used yet."""
        self.calls[before.index] = after
        return after

    def _record(
        self,
        op: Operation,
        group: Group | None,
        inputs: tuple[Call, ...],
        by: int | None = None,
        deferred: bool = False,
    ) -> Call:
        made = op.value(Emission(group, inputs, self.context))
        self.calls.append(Call(len(self.calls), op, inputs, group, made, by, deferred))
        return self.calls[-1]
