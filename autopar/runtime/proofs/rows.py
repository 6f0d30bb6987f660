"""What ranks have seen of each parameter, by probes, added up over its parts and over ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import torch

from autopar.ops.fragments import Fragment
from autopar.runtime.job.process_group import Group
from autopar.runtime.proofs.probes import PROJECTIONS, Seen
from autopar.runtime.proofs.subject import summed

Held = Sequence[tuple[Fragment, torch.Tensor, Seen]]
"""Of each fragment that a rank updates: which of the sampled elements it has, and what was seen of its gradient."""


class Row:
    """What ranks have seen of one member of a group. Python's numbers: there are a few dozen of them, and most of the
    time of an operator on so few is its call."""

    def __init__(self, elements: int) -> None:
        """`elements`: how many are sampled."""
        self.held = 0.0
        """Elements, over all ranks."""
        self.square = 0.0
        """The sum of their squares."""
        self.projections = [0.0] * PROJECTIONS
        self.sums = [0.0] * elements
        """The sampled elements, added up over the ranks that hold them."""
        self._counts = [0.0] * elements
        """How many ranks hold each."""

    def add(self, fragment: Fragment, which: torch.Tensor, seen: Seen) -> None:
        """Adds what a rank has seen of a part of it."""
        *numbers, norm = seen.flat.tolist()
        elements, projections = numbers[:-PROJECTIONS], numbers[-PROJECTIONS:]
        self.held += fragment.tensor.numel()
        self.square += norm * norm  # which may be infinite; a power of Python's would raise
        self.projections = [a + b for a, b in zip(self.projections, projections, strict=True)]
        for i, value in zip(which.tolist(), elements, strict=True):
            self.sums[i] += value
            self._counts[i] += 1

    @property
    def elements(self) -> list[float]:
        """The sampled ones, as the ranks that hold them have them."""
        return [value / max(1.0, count) for value, count in zip(self.sums, self._counts, strict=True)]

    @property
    def numbers(self) -> list[float]:
        """All that it holds."""
        return [self.held, self.square, *self.projections, *self.sums, *self._counts]

    def take(self, numbers: Sequence[float]) -> None:
        """Holds these instead."""
        self.held, self.square, *rest = numbers
        end = PROJECTIONS + len(self.sums)
        self.projections, self.sums, self._counts = rest[:PROJECTIONS], rest[PROJECTIONS:end], rest[end:]


def sum_rows(rows: Collection[Row], group: Group, more: Sequence[float] = ()) -> list[float]:
    """Sums rows over ranks, in place, and `more` numbers, which it returns. By all ranks together."""
    each = [r.numbers for r in rows]
    whole = summed(torch.tensor([*more, *chain.from_iterable(each)], dtype=torch.float64), group).tolist()
    begin = len(more)
    for row, own in zip(rows, each, strict=True):
        row.take(whole[begin : begin + len(own)])
        begin += len(own)
    return whole[: len(more)]
