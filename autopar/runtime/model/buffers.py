"""Buffers that the forward pass both reads and writes: one rank's values must be those of all, or replicas drift apart.

As with DDP, all ranks take rank 0's, here at the end of each step. Which buffers these are is read off each rank's
graphs, and ranks may run different ones: so they tell each other, as they sum how much their batches count.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from autopar.errors import AutoparWarning
from autopar.ir.buffers import read_and_written
from autopar.ir.capture import JointGraph
from autopar.runtime.job.process_group import Group


def shared_buffers(joint: JointGraph, group: Group) -> tuple[str, ...]:
    """Names of the buffers that are to be alike on all ranks; none with one rank. Warns, on rank 0, of each once."""
    names = () if group.world_size == 1 else read_and_written(joint)
    if names and group.rank == 0:
        warnings.warn(
            f"the model reads and writes {', '.join(repr(n) for n in names[:5])} in its forward pass. As with DDP, all "
            "ranks take rank 0's values after each step, so what other ranks' batches would add is left out; one "
            "process would see all of it. Where that matters, sum over the ranks within forward",
            AutoparWarning,
            stacklevel=2,
        )
    return names


class SharedBuffers:
    """The buffers that are to be alike on all ranks, as these agree from step to step; there are ever more of them."""

    def __init__(self) -> None:
        self.agreed: frozenset[str] = frozenset()
        """Those that all ranks know of."""
        self.mine: frozenset[str] = frozenset()
        """These, and those of the graphs that this rank has run."""

    def __contains__(self, name: object) -> bool:
        return name in self.mine

    def run(self, names: Iterable[str]) -> str:
        """Is told of the buffers of graphs that are about to run; returns what ranks compare in a step."""
        self.mine = self.mine.union(names)
        return "\n".join(sorted(self.mine))

    def agree(self, texts: Sequence[str]) -> None:
        """Takes over what ranks have found that compared different things: from now on, all share each of them."""
        self.agreed = self.mine = frozenset(name for text in texts for name in text.split("\n") if name)

    def settle(self) -> list[str]:
        """Those that are to be shared behind the step, on all ranks the same: they have compared what each knew."""
        self.agreed = self.mine
        return sorted(self.agreed)
