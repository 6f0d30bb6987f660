"""What the primitives of one sync group ask of memory: the buffers that they make, and which of them still use each.

Sizes are those of the buffers that `autopar.runtime` makes. All of it depends on the group and the context alone, so
that plans which share a group share it; only when each primitive runs depends on the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.cost_models.exchanges import goes_around, in_rounds
from autopar.ir.primitives import COLLECTIVES, DTYPE_BYTES, LARGE_BYTES, Kind, Primitive, all_teams
from autopar.strategies.base import Group

Bytes = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]
_IN_PLACE = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.STORE, Kind.DELIVER, Kind.CLIP, Kind.COUNT})


@dataclass
class Buffer:
    """Memory that a primitive makes for its value. Primitives are numbered from the first of their group."""

    sizes: int | Bytes
    """By rank, or of every rank."""
    made_by: int
    uses: list[tuple[int, int]] = field(default_factory=list)
    """Each use: the primitive, and 1 where the buffer is free already before it, as it waits until that was sent."""
    measured: bool = False
    """Whether the global norm is taken of it."""
    late: bool = False
    """Whether it is there from the step before."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Those of one group, in columns."""

    sizes: Bytes
    """[buffer, rank]"""
    made_by: Indices
    """[buffer]"""
    uses: Indices
    """[3, use]: the buffer, the primitive, and whether it is free already before."""
    measured: Indices
    late: Indices

    @classmethod
    def of(cls, rows: Sequence[Buffer], n: int) -> Buffers:
        sizes = [[b.sizes] * n if isinstance(b.sizes, int) else b.sizes for b in rows]
        return cls(
            sizes=np.array(sizes, np.int64).reshape(-1, n),
            made_by=np.array([b.made_by for b in rows], np.int64),
            uses=np.array([(i, *use) for i, b in enumerate(rows) for use in b.uses], np.int64).reshape(-1, 3).T,
            measured=np.array([i for i, b in enumerate(rows) if b.measured], np.int64),
            late=np.array([i for i, b in enumerate(rows) if b.late], np.int64),
        )


def buffers(
    group: Group, primitives: Sequence[Primitive], n: int, *, rounds: bool, measured: Collection[int] = ()
) -> list[Buffer]:
    """Of a group and its primitives on n ranks; what one rank needs for longer than the others is two buffers.

    `rounds`: whether the backend leaves large exchanges to the runtime's own; `measured`: indices of values that the
    global norm is taken of.
    """
    first = primitives[0].index
    sent = {i for p in primitives if p.kind in COLLECTIVES for i in p.inputs}
    found: list[Buffer] = []
    lies_in: dict[int, Buffer] = {}
    """By value; what is not here is a parameter, or a gradient."""
    for i, p in enumerate(primitives):
        inputs = [used - first for used in p.inputs]
        if p.late and p.kind in (Kind.WAIT, Kind.STORE):
            if inputs[0] in lies_in and lies_in[inputs[0]].late:  # of the step before
                lies_in[inputs[0]].uses = [(i, 0)]
            continue
        if p.kind is Kind.LET_GO:
            rest = lies_in[inputs[0]]
            found.append(replace(rest, sizes=p.bytes, uses=[*rest.uses, (i, 0)]))
            rest.sizes = rest.sizes - p.bytes
            continue
        source = primitives[inputs[0]] if inputs else None
        size = _size(p, source, n, rounds, packed=p.index in sent and len(group.members) > 1)
        if size is not None:
            lies_in[i] = Buffer(size, i, late=p.late)
            found.append(lies_in[i])
        elif inputs and inputs[0] in lies_in:
            lies_in[i] = lies_in[inputs[0]]
        if p.kind is Kind.UPDATE and p.owner is not None and (taken := lies_in.get(inputs[0])):
            owns = np.arange(n) == p.owner  # the others do nothing here
            found.append(replace(taken, sizes=taken.sizes * ~owns, uses=list(taken.uses)))
            taken.sizes = taken.sizes * owns
        if p.kind is Kind.FORM and (passing := _joined_factors(group, p, n)):
            found.append(Buffer(passing, i, [(i, 0)]))
        for value in (i, *inputs):
            if value in lies_in:
                lies_in[value].uses.append((i, 0))
        for used in source.inputs if source and source.kind in COLLECTIVES else ():
            if used - first in lies_in:
                lies_in[used - first].uses.append((i, 1))
        if p.index in measured and i in lies_in:
            lies_in[i].measured = True
    return found


def _size(p: Primitive, source: Primitive | None, n: int, rounds: bool, packed: bool) -> int | Bytes | None:
    """What a primitive allocates, as `_allocated` says it, less what is made in pieces."""
    sent = source if p.kind is Kind.WAIT and source is not None else p
    size = _allocated(p, source, n, packed, rounds and in_rounds(sent))
    if size is None or not (p.in_pieces and rounds):
        return size
    return size * (size < LARGE_BYTES)


def _allocated(p: Primitive, source: Primitive | None, n: int, packed: bool, rounds: bool) -> int | Bytes | None:
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
            return held(p, n) * width
        case Kind.FORM:
            return (p.elements if p.touched is None else p.touched) * width
        case Kind.REDUCE_SCATTER:
            team = len(all_teams(p.teams, n)[0])
            return held(p, n) * width * (team - 1 if rounds and goes_around(p, n) else team)
        case Kind.ALL_GATHER:
            repeated = len(set(p.splits)) > 1 and not rounds
            return held(p, n) * width * n + p.bytes if repeated else p.bytes
        case Kind.BROADCAST:
            size = np.full(n, p.bytes, np.int64)
            size[p.owner] = 0
            return size
    return None


def _joined_factors(group: Group, p: Primitive, n: int) -> int:
    """Bytes that the factors of all ranks take once more while a product is formed of them, of one member at a time."""
    factors = [m.parts for m in group.members if m.parts.kind == "factors"]
    return max((n * f.rows * f.row_width for f in factors), default=0) * DTYPE_BYTES[p.dtype]


def held(p: Primitive, n: int) -> int | Bytes:
    """`held_elements` of every rank, as one number where all hold the same."""
    if p.splits:
        return np.array(p.splits, dtype=np.int64)
    if p.owner is None or p.kind is Kind.BROADCAST:
        return p.elements
    of_owner = np.zeros(n, dtype=np.int64)
    of_owner[p.owner] = p.elements
    return of_owner
