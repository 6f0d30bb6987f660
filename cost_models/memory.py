"""Peak memory of each rank: what the step holds at its fullest moment.

Counted: parameters (less what lives on other ranks), buffers and the batch, optimizer state of what the rank updates,
activations (`ComputeNode.live_bytes`), gradients from their completion until they are packed, and communication
buffers as `autopar.runtime` makes them. Not counted: the allocator's fragmentation, the backend's own buffers, the
Python process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.cost_models.exchanges import goes_around, in_rounds
from autopar.cost_models.optimizers import OptimizerCost
from autopar.ir.primitives import (
    COLLECTIVES,
    DTYPE_BYTES,
    GATHERED,
    LARGE_BYTES,
    Kind,
    Primitive,
    all_teams,
)
from autopar.ir.training_graph import TrainingGraph
from autopar.strategies import Context
from autopar.strategies.lowering import Known, StepProgram

Bytes = npt.NDArray[np.int64]
_IN_PLACE = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.STORE, Kind.DELIVER, Kind.CLIP, Kind.COUNT})


class MemoryModel:
    """Peak memory of programs for one graph; what depends on no plan is computed once."""

    def __init__(self, graph: TrainingGraph, rounds: bool = False) -> None:
        """`rounds`: whether the backend leaves large exchanges to the runtime's own rounds, as gloo does on CPUs."""
        self.rounds = rounds
        parameters = sum(p.numel * DTYPE_BYTES.get(p.dtype, 4) for p in graph.model.parameters)
        self.fixed_bytes = parameters + graph.buffer_bytes + graph.input_bytes
        self.live: Bytes = np.array([n.live_bytes for n in graph.compute] or [0], dtype=np.int64)
        """Of the graph itself, by position in its compute: while the node runs."""
        self._own = [n.own_bytes for n in graph.compute]
        self._needed_until = [n.needed_until for n in graph.compute]
        self._position = {n.name: i for i, n in enumerate(graph.compute)}
        self.behind: Bytes = np.minimum(self.live, [*self.live[1:], 0])
        """The same between a node and the next one."""
        if any(self._own):
            self.behind = self._alive(range(len(self._own)))[1]
        self._index = {p.name: i for i, p in enumerate(graph.parameters)}
        self._ready = np.array([p.ready for p in graph.parameters], dtype=np.int64)
        self._allocated: dict[Context, Known[int | Bytes | None]] = {}
        self._size = np.array([p.numel * DTYPE_BYTES[p.spec.dtype] for p in graph.parameters], dtype=np.int64)

    def peaks(self, program: StepProgram, optimizer: OptimizerCost) -> tuple[int, ...]:
        """Peak bytes of each rank."""
        n = program.context.world_size
        positions = np.array([p.position for p in program.placed], dtype=np.int64)
        while_running, in_between = self._gradients(program, positions)
        not_run, not_held = self._alive([self._position[name] for name in program.replaced - program.handed])
        live, behind = self.live - not_run + while_running, self.behind - not_held
        made, freed, carried = self._buffers(program, n)
        before = carried + np.concatenate([np.zeros((1, n), np.int64), np.cumsum(made - freed, axis=0)])
        # Between two placed primitives the graph's own peak counts, on top of the buffers held there.
        cuts = np.unique(np.concatenate([[0], positions + 1]))
        cuts = cuts[cuts < len(live)]
        segment_peak = np.maximum.reduceat(live, cuts)
        held_then = before[np.searchsorted(positions, cuts, side="left")]
        peak = (segment_peak[:, None] + held_then).max(axis=0)
        if len(positions):
            at = np.where(positions >= 0, behind[np.maximum(positions, 0)], 0) + in_between
            peak = np.maximum(peak, (at[:, None] + before[:-1] + made).max(axis=0))
        return tuple(
            int(x) for x in self.fixed_bytes - _elsewhere(program, n) + _state_bytes(program, optimizer, n) + peak
        )

    def _alive(self, nodes: Iterable[int]) -> tuple[Bytes, Bytes]:
        """What these nodes allocate, by position: while a node runs, and behind it."""
        running, behind = np.zeros(len(self.live) + 2, np.int64), np.zeros(len(self.live) + 2, np.int64)
        for i in nodes:
            size, until = self._own[i], self._needed_until[i]
            if size:
                running[i] += size
                running[until + 1] -= size
                behind[i] += size
                behind[until] -= size
        count = len(self.live)
        return np.cumsum(running)[:count], np.cumsum(behind)[:count]

    def _gradients(self, program: StepProgram, positions: Bytes) -> tuple[Bytes, Bytes]:
        """Bytes of gradients that are complete and not yet packed: while each node runs, and at each placed primitive.
        With one rank nothing is packed: they live until their update."""
        consumers = (Kind.PACK,) if program.context.world_size > 1 else (Kind.UPDATE, Kind.DELIVER)
        packs = f"{GATHERED}pack"
        taken_by = {
            placed.primitive.group: i
            for i, placed in enumerate(program.placed)
            if placed.primitive.kind in consumers or placed.primitive.work == packs
        }
        is_sent = np.zeros(len(program.placed), np.int64)
        for i in taken_by.values():  # one gradient that is sent as it is becomes the buffer
            taker = program.placed[i].primitive
            is_sent[i] = taker.kind is Kind.PACK and _as_it_is(taker, program)
        packed = {group for group, i in taken_by.items() if program.placed[i].primitive.work == packs}
        never_formed = {p.group for p in program.primitives if p.kind is Kind.PARTS} | (program.resident - packed)
        count, end = len(program.placed), len(self.live) - 1
        taken = np.full(len(self._ready), -1)
        members = [self._index[m.slice.name] for group in program.groups for m in group.members]
        consumed = [
            -1 if group.index in never_formed else taken_by.get(group.index, count)
            for group in program.groups
            for _ in group.members
        ]
        np.maximum.at(taken, members, consumed)
        formed = taken >= 0
        until = np.append(positions, end)[taken]
        running = np.zeros(len(self.live) + 2, np.int64)
        np.add.at(running, (self._ready + 1)[formed], self._size[formed])
        np.add.at(running, (until + 1)[formed], -self._size[formed])
        placed = np.zeros(count + 2, np.int64)
        np.add.at(placed, np.searchsorted(positions, self._ready, side="left")[formed], self._size[formed])
        np.add.at(placed, (taken + 1 - np.append(is_sent, 0)[taken])[formed], -self._size[formed])
        return np.cumsum(running)[: len(self.live)], np.cumsum(placed)[:count]

    def _size_of(self, p: Primitive, program: StepProgram, n: int) -> int | Bytes | None:
        """What a primitive allocates, as `allocated` says it, less what is made in pieces."""
        packed = p.index in program.sent and len(program.groups[p.group].members) > 1
        source = _source(p, program.primitives)
        sent = source if p.kind is Kind.WAIT and source is not None else p
        size = allocated(p, source, n, packed, self.rounds and in_rounds(sent))
        if size is not None and p.in_pieces and self.rounds:
            size = np.where(np.asarray(size) < LARGE_BYTES, size, 0)
        return size

    def _buffers(self, program: StepProgram, n: int) -> tuple[Bytes, Bytes, Bytes]:
        """What each placed primitive allocates, and what is free behind it: both [placed primitive, rank]. And what is
        there from the step before, by rank."""
        known = self._allocated.setdefault(program.context, {})
        allocates = program.each(known, lambda p: self._size_of(p, program, n))
        primitives, sizes = program.primitives, list[int | Bytes]([0] * len(program.placed))
        root = list(range(len(primitives)))
        """Of each value, the one whose memory it lies in."""
        last = [-1] * len(primitives)
        born: dict[int, int] = {}
        received: dict[int, int] = {}
        dropped: list[tuple[int, int, Bytes]] = []
        """Values that some ranks have no use for any more, with the place behind which that is so, and these ranks."""
        for i, placed in enumerate(program.placed):
            p = placed.primitive
            if p.late and p.kind in (Kind.WAIT, Kind.STORE):  # of the step before
                received.setdefault(p.inputs[0], i)
                continue
            index, size = p.index, allocates[p.index]
            source = _source(p, primitives)
            if size is not None:
                sizes[i] = size
                born[index] = i
            elif source is not None:
                root[index] = root[source.index]
            if p.kind is Kind.UPDATE and p.owner is not None:  # the others do nothing here
                value = root[p.inputs[0]]
                dropped.append((value, last[value], np.arange(n) != p.owner))
            last[root[index]] = i
            for used in p.inputs:
                last[root[used]] = i
            if source is not None and source.kind in COLLECTIVES:
                for used in source.inputs:  # until it was sent
                    last[root[used]] = max(last[root[used]], i - 1)
        made = _by_rank(sizes, n)
        freed, carried = np.zeros_like(made), np.zeros(n, np.int64)
        for i, placed in enumerate(program.placed):
            if placed.primitive.kind is Kind.FORM:
                passing = _joined_factors(placed.primitive, program, n)
                made[i] += passing
                freed[i] += passing
        for index, i in received.items():  # of what is begun in one step and completed in the next
            last[index] = i
        np.add.at(freed, [last[index] for index in born], made[list(born.values())])
        for value, i, ranks in dropped:
            if value in born:
                freed[last[value], ranks] -= made[born[value], ranks]
                freed[i, ranks] += made[born[value], ranks]
        for index, i in born.items():
            if primitives[index].late:
                carried += made[i]
        return made, freed, carried


def _source(p: Primitive, primitives: Sequence[Primitive]) -> Primitive | None:
    """What a primitive works on, where that is one value."""
    return primitives[p.inputs[0]] if p.inputs and p.kind is not Kind.CLIP else None


def _as_it_is(pack: Primitive, program: StepProgram) -> bool:
    group = program.groups[pack.group]
    return len(group.members) == 1 and group.dtype == pack.dtype


def _by_rank(sizes: Sequence[int | Bytes], n: int) -> Bytes:
    """One row for each, of n ranks."""
    unequal = [(i, size) for i, size in enumerate(sizes) if not isinstance(size, int)]
    alike = list(sizes)
    for i, _ in unequal:
        alike[i] = 0
    found = np.repeat(np.array(alike, np.int64)[:, None], n, axis=1)
    for i, size in unequal:
        found[i] = size
    return found


def allocated(
    p: Primitive, source: Primitive | None, n: int, packed: bool = False, rounds: bool = False
) -> int | Bytes | None:
    """Bytes that a primitive allocates, on every one of n ranks or by rank; `None` where it works in place, on its
    input's memory. `packed`: whether what it updates is packed, to be sent; one tensor is sent as it is. `rounds`:
    whether the runtime makes the collective, this one or that which is waited for, of messages of its own.

    As `autopar.runtime.collectives` does it: the sum behind a reduce-scatter is taken by its wait, from one part of
    every rank, or grows on its way around a ring, with a part for each rank that it comes by; an all-gather of unequal
    parts that does not go in rounds repeats the part for each receiver.
    """
    if p.kind in _IN_PLACE or p.in_place:
        return None
    width = DTYPE_BYTES[p.dtype]
    match p.kind:
        case Kind.WAIT if source is None or source.kind is not Kind.REDUCE_SCATTER:
            return None
        case Kind.WAIT if rounds and source is not None and source.dtype == p.dtype and goes_around(source, n):
            return None
        case Kind.PACK:
            return None if n == 1 else p.bytes
        case Kind.UPDATE if not packed:
            return 0  # what is sent is the parameter itself
        case Kind.LOCAL if p.touched is not None:
            return p.touched * width
        case Kind.WAIT | Kind.UPDATE | Kind.PARTS | Kind.LOCAL | Kind.ALL_TO_ALL:
            return _held(p, n) * width
        case Kind.FORM:
            return (p.elements if p.touched is None else p.touched) * width
        case Kind.REDUCE_SCATTER:
            team = len(all_teams(p.teams, n)[0])
            return _held(p, n) * width * (team - 1 if rounds and goes_around(p, n) else team)
        case Kind.ALL_GATHER:
            repeated = len(set(p.splits)) > 1 and not rounds
            return _held(p, n) * width * n + p.bytes if repeated else p.bytes
        case Kind.BROADCAST:
            size = np.full(n, p.bytes, np.int64)
            size[p.owner] = 0
            return size
    return None


def _joined_factors(p: Primitive, program: StepProgram, n: int) -> int:
    """Bytes that the factors of all ranks take once more while a product is formed of them, of one member at a time."""
    factors = [m.parts for m in program.groups[p.group].members if m.parts.kind == "factors"]
    return max((n * f.rows * f.row_width for f in factors), default=0) * DTYPE_BYTES[p.dtype]


def _elsewhere(program: StepProgram, n: int) -> Bytes:
    """Of the parameters, what other ranks keep."""
    total = np.zeros(n, np.int64)
    for p in program.primitives:
        if p.resident:
            total += (p.elements - np.asarray(_held(p, n))) * DTYPE_BYTES[p.dtype]
    return total


def _state_bytes(program: StepProgram, optimizer: OptimizerCost, n: int) -> Bytes:
    """Optimizer state of what each rank updates."""
    held = [_held(p, n) * DTYPE_BYTES[p.dtype] for p in program.primitives if p.kind is Kind.UPDATE]
    total: Bytes = _by_rank(held, n).sum(0)
    return total * optimizer.state_tensors


def _held(p: Primitive, n: int) -> int | Bytes:
    """`held_elements` of every rank, as one number where all hold the same."""
    if p.splits:
        return np.array(p.splits, dtype=np.int64)
    if p.owner is None or p.kind is Kind.BROADCAST:
        return p.elements
    held = np.zeros(n, dtype=np.int64)
    held[p.owner] = p.elements
    return held
