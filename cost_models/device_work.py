"""What a primitive takes on a rank's own device: packing, updating, storing, and handing collectives over.

As `autopar.runtime` does them; bytes read and written, over the device's memory rate.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.cost_models.compute import Rates
from autopar.cost_models.optimizers import OptimizerCost
from autopar.ir.primitives import COLLECTIVES, DTYPE_BYTES, Kind, Primitive
from autopar.strategies.lowering import StepProgram

MEMBER_START = 0.2
"""Of a node's start, for each tensor in a for-each copy. [Empirical: 1 to 2 us on a CPU]"""

UPDATE_START = 1.0
"""Of a node's start, for each parameter in an optimizer's step, which looks it up in Python. [Empirical: 5 to 10 us]"""


PART_KERNELS = 5
"""Kernels for each gradient whose parts are counted, packed or put together: a sort, an addition by index, copies.
[Empirical, of the right order]"""


class Work(NamedTuple):
    """A primitive, with what its price on a device depends on besides."""

    primitive: Primitive
    source: Primitive | None
    """Its input, where it has one."""
    members: int
    """Parameters or slices in its group."""
    dtype: str
    """Of the group's parameters."""
    sent: bool
    """Whether a collective takes its value."""
    stored_at: int | None
    """The rank that need not store what it sent, where one does."""

    @classmethod
    def of(cls, primitive: Primitive, program: StepProgram) -> Work:
        """Reads from the program what belongs to a primitive."""
        source = program.primitives[primitive.inputs[0]] if len(primitive.inputs) == 1 else None
        stored_at = _broadcaster(primitive, program) if primitive.kind is Kind.STORE else None
        sent = primitive.index in program.sent
        if not 0 <= primitive.group < len(program.groups):
            return cls(primitive, source, 1, primitive.dtype, sent, stored_at)
        group = program.groups[primitive.group]
        return cls(primitive, source, len(group.members), group.dtype, sent, stored_at)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal keys cost the same."""
        p, s = self.primitive, self.source
        of_source = (s.kind, s.dtype, s.teams) if s else None
        work = (p.flops, p.moved_bytes, p.touched)
        return (
            p.kind,
            p.elements,
            p.dtype,
            p.splits,
            p.owner,
            p.teams,
            p.summed_by,
            work,
            of_source,
            self.members,
            self.dtype,
            self.sent,
            self.stored_at,
        )

    def seconds(self, rank: int, rates: Rates, optimizer: OptimizerCost, world_size: int, issue_s: float) -> float:
        """On `rank`, whose device has these rates."""
        p = self.primitive
        if p.kind in COLLECTIVES:
            return issue_s + self._before_sending(rank, rates, world_size)
        if p.kind is Kind.PACK:
            return self._pack(rates, world_size)
        if p.kind in (Kind.COUNT, Kind.PARTS, Kind.FORM, Kind.LOCAL):
            return rates.node_s(p.flops, p.moved_bytes) + (self.members * PART_KERNELS - 1) * rates.start_s
        if p.kind is Kind.WAIT:
            return self._after_wait(rank, rates, world_size)
        if p.kind is Kind.UPDATE:
            return self._update(rank, rates, optimizer)
        if p.kind is Kind.STORE and rank != self.stored_at:
            return rates.copy_s(2 * p.bytes, 1 + MEMBER_START * self.members)
        if p.kind is Kind.DELIVER:
            cast = 2 * p.bytes if self._cast else 0
            return rates.copy_s(cast) + MEMBER_START * self.members * rates.start_s
        return 0.0

    @property
    def _cast(self) -> bool:
        return self.source is not None and self.source.dtype != self.dtype

    def _pack(self, rates: Rates, world_size: int) -> float:
        """One pass over the gradients; nothing for one rank, nor for one gradient that is sent as it is."""
        p = self.primitive
        if world_size == 1 or (self.members == 1 and p.dtype == self.dtype):
            return 0.0
        moved = p.elements * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[p.dtype])
        return rates.copy_s(moved, 1 + MEMBER_START * self.members)

    def _before_sending(self, rank: int, rates: Rates, world_size: int) -> float:
        """An all-gather of unequal parts repeats the part for every receiver."""
        p = self.primitive
        team = p.team_of(rank, world_size)
        if p.kind is Kind.ALL_GATHER and len({p.splits[r] for r in team}) > 1:
            return rates.copy_s((1 + len(team)) * p.held_elements(rank) * DTYPE_BYTES[p.dtype])
        return 0.0

    def _after_wait(self, rank: int, rates: Rates, world_size: int) -> float:
        """Behind a reduce-scatter, the parts that came from all ranks are added up."""
        p = self.primitive
        if self.source is None or self.source.kind is not Kind.REDUCE_SCATTER:
            return 0.0
        parts = len(self.source.team_of(rank, world_size))
        return rates.copy_s(p.held_elements(rank) * (parts * DTYPE_BYTES[p.dtype] + DTYPE_BYTES[self.dtype]))

    def _update(self, rank: int, rates: Rates, optimizer: OptimizerCost) -> float:
        """The optimizer on what the rank holds; what is sent is packed again, unless it is one tensor."""
        p = self.primitive
        held = p.held_elements(rank)
        if held == 0:
            return 0.0
        width = DTYPE_BYTES[self.dtype]
        tensors = float(optimizer.moved_tensors)
        if self._cast:
            tensors += 1.5
        if self.sent and self.members > 1:
            tensors += 2
        touched = max(1.0, self.members * held / p.elements)
        if p.touched is not None:
            held = min(held, p.touched)
        return rates.update_s(held * width * tensors, 1 + UPDATE_START * touched)


def clip_s(primitive: Primitive, program: StepProgram, rank: int, rates: Rates) -> float:
    """The norm over everything that a rank holds, read once."""
    held = 0
    for index in primitive.inputs:
        source = program.primitives[index]
        held += source.held_elements(rank) * DTYPE_BYTES[source.dtype]
    return rates.copy_s(held, 1 + MEMBER_START * len(primitive.inputs))


def _broadcaster(primitive: Primitive, program: StepProgram) -> int | None:
    while primitive.inputs:
        primitive = program.primitives[primitive.inputs[0]]
        if primitive.kind is Kind.BROADCAST:
            return primitive.owner
    return None
