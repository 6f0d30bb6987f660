"""Peak memory of each rank: what the step holds at its fullest moment.

Counted: parameters (less what lives on other ranks), buffers and the batch, optimizer state of what the rank updates,
activations (`ComputeNode.live_bytes`), gradients from their completion until they are packed, and communication
buffers as operations declare them. Not counted: the allocator's fragmentation, the backend's own buffers, the
Python process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.alike import FEW, alike
from autopar.cost_models.buffers import Buffers, Bytes, Indices, buffers
from autopar.cost_models.optimizers import OptimizerCost
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.values import Setting
from autopar.strategies.lowering import Known, StepProgram


@dataclass(frozen=True, slots=True)
class _OfGroup:
    """What is known of a group before it is known when its calls run. They are numbered from its first."""

    buffers: Buffers
    members: Indices
    """The group's members, by index among the graph's parameters."""
    taken_by: int
    """The call that takes up their gradients; -1 where they are there until the step's end."""
    as_it_is: bool
    """Whether it takes one gradient as it is, which becomes the buffer."""
    formed: bool
    """Whether the group's gradients are ever formed on a rank."""
    lasting: Bytes
    """[3, rank], or [3, 1] where all ranks are alike: what the optimizer updates; of the parameters, what other ranks
    keep; and what its strategy keeps from step to step."""


@dataclass(frozen=True, slots=True)
class Course:
    """What one step of a program holds besides what lasts, moment by moment. Ranks that are alike share a column."""

    live: Bytes
    """[position]: bytes of the graph and of complete gradients, while each node runs."""
    running: Bytes
    """[position]: bytes of gradients that are complete and not yet packed, included in `live`."""
    cuts: Indices
    """[stretch]: where each stretch of nodes begins that no placed call interrupts."""
    held: Bytes
    """[stretch, column]: bytes of communication buffers there."""
    behind: Bytes
    """[placed call]: bytes of the graph and of complete gradients, while the call runs."""
    complete: Bytes
    """[placed call]: bytes of gradients that are complete and not yet packed, included in `behind`."""
    buffered: Bytes
    """[placed call, column]: bytes of communication buffers then, including those that the call makes."""
    before: Indices
    """[stretch]: how many calls are placed before it."""
    lasting: Bytes
    """[3, column]: bytes that last from step to step, as `_OfGroup.lasting`, summed over all groups."""
    of_rank: Indices
    """[rank]: the column that holds the rank's figures."""
    sizes: Bytes
    """[buffer, column]: bytes of each buffer."""
    made_by: Indices
    """[buffer]: the call, by its index."""
    made_at: Indices
    """[buffer]: the placed call that makes it."""
    last: Indices
    """[buffer]: the placed call that uses it last; -1 for none."""
    late: Indices
    """Indices of the buffers that the step before has left."""

    @property
    def highest(self) -> Bytes:
        """[column]: bytes at the fullest moment of the step, besides what lasts."""
        peak: Bytes = (np.maximum.reduceat(self.live, self.cuts)[:, None] + self.held).max(axis=0)
        if len(self.buffered):
            peak = np.maximum(peak, (self.behind[:, None] + self.buffered).max(axis=0))
        return peak


class MemoryModel:
    """Peak memory of programs for one graph; what depends on no plan is computed once."""

    def __init__(self, graph: TrainingGraph, rounds: bool = False, sums: bool = False) -> None:
        """`rounds` and `sums`: what the backend does, as `Setting` has it."""
        self.rounds, self.sums = rounds, sums
        parameters = sum(p.numel * DTYPE_BYTES.get(p.dtype, 4) for p in graph.model.parameters)
        self.parameter_bytes = parameters
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
        self._of_groups: dict[Context, Known[_OfGroup]] = {}
        self._alike: dict[tuple[object, ...], _OfGroup] = {}
        self._without: dict[frozenset[str], tuple[Bytes, Bytes]] = {}
        self._size = np.array([p.numel * DTYPE_BYTES[p.spec.dtype] for p in graph.parameters], dtype=np.int64)

    def peaks(self, program: StepProgram, optimizer: OptimizerCost) -> tuple[int, ...]:
        """Peak bytes of each rank, by rank."""
        if not program.groups:
            return (self.fixed_bytes + int(self.live.max()),) * program.context.world_size
        course = self.course(program)
        updated, elsewhere, kept = course.lasting
        peak = self.fixed_bytes - elsewhere + optimizer.state_tensors * updated + kept + course.highest
        return tuple(peak[course.of_rank].tolist())

    def course(self, program: StepProgram) -> Course:
        """What a step of a program that has groups holds, moment by moment."""
        n = program.context.world_size
        clip = next(c for c in program.calls if c.group is None) if program.context.clips else None
        measured = frozenset(c.index for c in clip.inputs) if clip else frozenset[int]()
        known = self._of_groups.setdefault(program.context, {})
        found = program.of_groups(known, lambda group, own: self._of_group(group, own, n, measured))
        first, groups = np.array([i for i, _ in found]), [group for _, group in found]
        count = len(program.placed)
        positions = np.fromiter(program.positions, np.int64, count)
        place = np.empty(len(program.calls), np.int64)
        """Of each call, by its index, among those that are placed."""
        place[np.fromiter(program.order, np.int64, count)] = np.arange(count)
        while_running, in_between = self._gradients(groups, first, place, positions)
        live, behind = self._graph(program.replaced - program.handed)
        live = live + while_running
        clipped = int(place[clip.index]) if clip else 0
        ranks, of_rank = _columns([x for g in groups for x in (g.buffers.sizes, g.lasting)], n)
        sizes = np.concatenate([_of(g.buffers.sizes, ranks) for g in groups])
        made_at, last, late = _lifetimes([g.buffers for g in groups], len(sizes), first, place, clipped)
        made, freed = _summed(sizes, made_at, len(place)), _summed(sizes, last, len(place))
        before = sizes[late].sum(0) + np.concatenate([np.zeros_like(made[:1]), np.cumsum(made - freed, axis=0)])
        # Between two placed calls the graph's own peak counts, on top of the buffers held there.
        cuts = np.unique(np.concatenate([[0], positions + 1]))
        cuts = cuts[cuts < len(live)]
        calls_before = np.searchsorted(positions, cuts, side="left")
        return Course(
            live=live,
            running=while_running,
            cuts=cuts,
            held=before[calls_before],
            behind=np.where(positions >= 0, behind[np.maximum(positions, 0)], 0) + in_between,
            complete=in_between,
            buffered=before[:-1] + made,
            before=calls_before,
            lasting=np.concatenate([_of(g.lasting, ranks) for g in groups]).reshape(-1, 3, len(ranks)).sum(axis=0),
            of_rank=of_rank,
            sizes=sizes,
            made_by=_joined([g.buffers.made_by for g in groups], first),
            made_at=made_at,
            last=last,
            late=late,
        )

    def _of_group(self, group: Group, own: Sequence[Call], n: int, measured: frozenset[int]) -> _OfGroup:
        """What is known of a group, which is that of a group of other members whose calls are alike."""
        first = own[0].index
        wired = tuple((c.key, c.deferred, c.index in measured, *(i.index - first for i in c.inputs)) for c in own)
        known = self._alike.get((n, wired))
        if known is None:
            known = self._alike[n, wired] = self._first_of_kind(own, n, measured)
        return replace(known, members=np.array([self._index[m.slice.name] for m in group.members]))

    def _first_of_kind(self, own: Sequence[Call], n: int, measured: frozenset[int]) -> _OfGroup:
        # With one rank nothing is packed: gradients live until their update.
        taken_by = max(
            (i for i, c in enumerate(own) if (c.op.takes_gradients if n > 1 else c.op.takes_clip)), default=-1
        )
        taker, keeps_rows = own[taken_by], any(c.op.keeps_shards for c in own)
        size = np.array([c.bytes for c in own])
        held = [c.held_bytes(n) for c in own]
        setting = Setting(n, rounds=self.rounds, sums=self.sums)
        made, columns = Buffers.of(buffers(own, setting, measured), n), n if n <= FEW else 1
        return _OfGroup(
            buffers=replace(made, sizes=_wide(made.sizes, columns)),
            members=np.zeros(0, np.int64),
            taken_by=taken_by,
            as_it_is=taker.op.passes_through(taker),
            formed=taken_by >= 0 or not (keeps_rows or any(c.op.forms_gradients for c in own)),
            lasting=_wide(
                _by_rank(
                    sum(held[i] for i, c in enumerate(own) if c.op.updates),
                    sum(size[i] - held[i] for i, c in enumerate(own) if c.op.keeps_shards),
                    sum(c.op.keeps(c, setting) for c in own),
                ),
                columns,
            ),
        )

    def _graph(self, replaced: frozenset[str]) -> tuple[Bytes, Bytes]:
        """What the graph itself holds, by position, less nodes that are replaced: while a node runs, and behind it."""
        if replaced not in self._without:
            running, behind = self._alive([self._position[name] for name in replaced])
            self._without[replaced] = self.live - running, self.behind - behind
        return self._without[replaced]

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

    def _gradients(
        self, groups: Sequence[_OfGroup], first: Indices, place: Indices, positions: Indices
    ) -> tuple[Bytes, Bytes]:
        """Bytes of gradients that are complete and not yet packed: while each node runs, and at each placed
        call."""
        count, end = len(positions), len(self.live) - 1
        by = np.array([g.taken_by for g in groups])
        takes = np.where(by >= 0, place[first + by], count)
        as_it_is = np.zeros(count + 1, np.int64)
        as_it_is[takes] = [g.taken_by >= 0 and g.as_it_is for g in groups]
        takes[[not g.formed for g in groups]] = -1
        taken = np.full(len(self._ready), -1)
        np.maximum.at(
            taken, np.concatenate([g.members for g in groups]), np.repeat(takes, [len(g.members) for g in groups])
        )
        formed = taken >= 0
        taken, ready, size = taken[formed], self._ready[formed], self._size[formed]
        running = np.zeros(len(self.live) + 2, np.int64)
        np.add.at(running, ready + 1, size)
        np.add.at(running, np.append(positions, end)[taken] + 1, -size)
        placed = np.zeros(count + 2, np.int64)
        np.add.at(placed, np.searchsorted(positions, ready, side="left"), size)
        np.add.at(placed, taken + 1 - as_it_is[taken], -size)
        return np.cumsum(running)[: len(self.live)], np.cumsum(placed)[:count]


def _by_rank(*rows: int | Bytes) -> Bytes:
    return np.array(np.broadcast_arrays(*map(np.atleast_1d, rows)), np.int64)


def _wide(rows: Bytes, columns: int) -> Bytes:
    """Rows of one column, which is repeated to make `columns` of them; rows of several columns stay as they are."""
    return np.ascontiguousarray(np.broadcast_to(rows, (len(rows), max(columns, rows.shape[1]))))


def _columns(rows: Sequence[Bytes], n: int) -> tuple[Indices, Indices]:
    """The ranks whose figures are worked out, and for each rank, the place among these of the one that it equals. Few
    ranks are all worked out, as that is faster than finding those that are alike."""
    if n <= FEW:
        return np.arange(n), np.arange(n)
    return alike([x for x in rows if x.shape[1] > 1], n)


def _of(rows: Bytes, ranks: Indices) -> Bytes:
    """Columns of these ranks."""
    if rows.shape[1] == len(ranks):
        return rows
    return rows[:, ranks] if rows.shape[1] > 1 else np.broadcast_to(rows, (len(rows), len(ranks)))


def _lifetimes(
    groups: Sequence[Buffers], count: int, first: Indices, place: Indices, clipped: int
) -> tuple[Indices, Indices, Indices]:
    """Of all groups' `count` buffers: the placed call that makes each, and the one that uses it last; and which of them
    are there from the step before. `clipped`: where the global norm is taken, if it is."""
    begin = np.cumsum([0, *(len(b.made_by) for b in groups[:-1])])
    """Of each group's buffers among all."""
    made_at = place[_joined([b.made_by for b in groups], first)]
    last = np.full(count, -1)
    uses = np.concatenate([b.uses for b in groups], axis=1)
    of_group = np.repeat(np.arange(len(groups)), [b.uses.shape[1] for b in groups])
    np.maximum.at(last, uses[0] + begin[of_group], place[uses[1] + first[of_group]] - uses[2])
    measured = _joined([b.measured for b in groups], begin)
    last[measured] = np.maximum(last[measured], clipped)
    return made_at, last, _joined([b.late for b in groups], begin)


def _joined(columns: Sequence[Indices], offsets: Indices) -> Indices:
    """Of all groups, numbered on."""
    joined = np.concatenate(columns)
    return joined + np.repeat(offsets, [len(c) for c in columns]) if len(joined) else joined


def _summed(rows: Bytes, at: Indices, count: int) -> Bytes:
    """[count, rank]: the sums of rows that have the same place."""
    n = rows.shape[1]
    found = np.zeros(count * n, np.int64)
    np.add.at(found, (n * at[:, None] + np.arange(n)).ravel(), rows.ravel())
    return found.reshape(count, n)
