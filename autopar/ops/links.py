"""What a collective is told of a network, to say what it puts on each link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autopar.ops.subgroups import Subgroups

Vector = npt.NDArray[np.float64]
Phase = tuple[str, Vector]
"""The name of the collective of `Backend.fraction` whose share of the bandwidth is reached, and bytes on each link."""


class Links(Protocol):
    """The links of a cluster. What is given is by rank, what is returned by link."""

    world_size: int

    @property
    def chains(self) -> bool:
        """Whether reduce and broadcast pass the message along a chain in pieces, so that all its links work at once."""
        ...

    @property
    def sums(self) -> bool:
        """Whether a reduce-scatter adds up equal parts on their way around a ring, but for narrow numbers."""
        ...

    def ring(self, subgroups: Subgroups, sent: Vector) -> Vector:
        """Each rank sends so much on to the next one of its subgroup."""
        ...

    def from_each(self, subgroups: Subgroups, sent: Vector) -> Vector:
        """Each rank sends so much to every other one of its subgroup."""
        ...

    def to_each(self, subgroups: Subgroups, received: Vector) -> Vector:
        """Each rank receives so much from every other one of its subgroup."""
        ...

    def along(self, ways: Sequence[tuple[int, int, float]]) -> Vector:
        """Bytes from one rank, or host that serves, to another; hosts that serve are numbered behind the ranks."""
        ...
