"""What the calls of one sync group ask of memory: the buffers that they make, and which of them still use each.

Sizes are those that operations declare. All of it depends on the group and the context alone, so that plans which share
a group share it; only when each call runs depends on the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.ops.base import Call
from autopar.ops.layouts import Owned
from autopar.ops.values import Setting

Bytes = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@dataclass
class Buffer:
    """Memory that a call makes for its value. Calls are numbered from the first of their group."""

    sizes: int | Bytes
    """Bytes, by rank; one number where all ranks have as many."""
    made_by: int
    uses: list[tuple[int, int]] = field(default_factory=list)
    """Each use: the call, and 1 where the buffer is free already before it, as it waits until that was sent."""
    measured: bool = False
    """Whether the global norm is taken of it."""
    late: bool = False
    """Whether the step before has left the buffer."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of one sync group, as arrays."""

    sizes: Bytes
    """Bytes of each buffer: [buffer, rank], or [buffer, 1] where all ranks have as many."""
    made_by: Indices
    """[buffer]: the index in the group of the call that makes it."""
    uses: Indices
    """[3, use]: the buffer, the call, and whether it is free already before."""
    measured: Indices
    late: Indices

    @classmethod
    def of(cls, rows: Sequence[Buffer], n: int) -> Buffers:
        same = all(isinstance(b.sizes, int) for b in rows)
        sizes = np.empty((len(rows), 1 if same else n), np.int64)
        for i, b in enumerate(rows):
            sizes[i] = b.sizes
        return cls(
            sizes=sizes,
            made_by=np.array([b.made_by for b in rows], np.int64),
            uses=np.array([(i, *use) for i, b in enumerate(rows) for use in b.uses], np.int64).reshape(-1, 3).T,
            measured=np.array([i for i, b in enumerate(rows) if b.measured], np.int64),
            late=np.array([i for i, b in enumerate(rows) if b.late], np.int64),
        )


def buffers(calls: Sequence[Call], setting: Setting, measured: Collection[int] = ()) -> list[Buffer]:
    """The buffers that a group's calls make. One that a rank needs for longer than other ranks counts as two.
    `measured`: indices of calls of whose values the global gradient norm is taken."""
    first, n = calls[0].index, setting.world_size
    found: list[Buffer] = []
    lies_in: dict[int, Buffer] = {}
    """By value; what is not here is a parameter, or a gradient."""
    taken_by: dict[int, Buffer] = {}
    """In passing, by call: a collective has it until it is complete."""
    for i, call in enumerate(calls):
        inputs = [used.index - first for used in call.inputs]
        if call.completes_step_before:
            if inputs[0] in lies_in and lies_in[inputs[0]].late:
                lies_in[inputs[0]].uses = [(i, 0)]
            continue
        if call.op.freed_elements():
            rest = lies_in[inputs[0]]
            found.append(replace(rest, sizes=call.bytes, uses=[*rest.uses, (i, 0)]))
            rest.sizes = rest.sizes - call.bytes
            continue
        size = call.op.allocates(call, setting)
        if size is not None:
            lies_in[i] = Buffer(size, i, late=call.deferred)
            found.append(lies_in[i])
        elif inputs and inputs[0] in lies_in:
            lies_in[i] = lies_in[inputs[0]]
        if call.op.updates and isinstance(call.layout, Owned) and (taken := lies_in.get(inputs[0])):
            owns = np.arange(n) == call.layout.rank  # the others do nothing here
            found.append(replace(taken, sizes=taken.sizes * ~owns, uses=list(taken.uses)))
            taken.sizes = taken.sizes * owns
        passing = call.op.passing_bytes(call, setting)
        if passing if isinstance(passing, int) else passing.any():
            taken_by[i] = Buffer(passing, i, [(i, 0)])
            found.append(taken_by[i])
        for value in (i, *inputs):
            if value in lies_in:
                lies_in[value].uses.append((i, 0))
        if call.inputs and call.inputs[0].is_pending:
            sent = [lies_in.get(used.index - first) for used in call.inputs[0].inputs]
            for buffer in (*sent, taken_by.get(inputs[0])):
                if buffer is not None:
                    buffer.uses.append((i, 1))
        if call.index in measured and i in lies_in:
            lies_in[i].measured = True
    return found
