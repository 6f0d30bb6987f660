"""Which captures are to serve batches of many sizes: those of batches that differ in sizes alone.

The first batch's capture is for its sizes alone: plans and prices rest on it. When another one comes that differs from
it in sizes, those become symbols (`autopar.ir.sizes`), and one capture serves all such batches, unless the model does
something else for some of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.ir.batch import Batch
from autopar.ir.served import Shapes, Varying

MOST_SYMBOLIC = 4
"""Captures with symbols, of batches that differ in sizes alone, that are made before each of their sizes gets a capture
of its own: a model may do something else for long sequences than for short ones."""


@dataclass
class _Met:
    """Batches that differ in sizes alone."""

    first: Shapes
    varying: Varying = frozenset()
    """In which dimensions they have differed so far."""
    captures: int = 0
    """With symbols, so far."""
    reason: str = ""
    """Why there are to be no more of these."""


@dataclass
class BatchShapes:
    """The shapes of a program's batches."""

    are_symbolic: bool
    """Whether there are to be captures with symbols."""
    _met: dict[Hashable, _Met] = field(default_factory=dict)
    """By what batches have in common that differ in sizes alone."""

    def varying(self, kind: Hashable, batch: Batch) -> Varying:
        """The dimensions whose sizes are to be symbols in a capture on `batch`; none where it is to be for the batch's
        sizes alone. `kind`: what batches that differ in sizes alone have in common."""
        met = self.meet(kind, batch)
        differ = {
            (i, d)
            for i, (own, other) in enumerate(zip(batch.shapes, met.first, strict=True))
            for d, (a, b) in enumerate(zip(own, other, strict=True))
            if a != b
        }
        met.varying |= differ
        if not self.are_symbolic or met.captures >= MOST_SYMBOLIC:
            return frozenset()
        # Of no or one element, a dimension is none to compute with: it may be passed over, or expanded.
        found = frozenset((i, d) for i, d in met.varying if batch.shapes[i][d] > 1)
        if not found or any(batch.shapes[i][d] < 2 for i, d in differ):
            return frozenset()
        met.captures += 1
        return found

    def meet(self, kind: Hashable, batch: Batch) -> _Met:
        """Takes note of a batch."""
        return self._met.setdefault(kind, _Met(batch.shapes))

    def give_up(self, kind: Hashable, reason: str) -> None:
        """Has each size of such batches captured by itself from now on."""
        self._met[kind].captures, self._met[kind].reason = MOST_SYMBOLIC, reason

    @property
    def reasons(self) -> list[str]:
        """Why batches that differ in sizes alone are captured one by one."""
        return [m.reason for m in self._met.values() if m.reason]
