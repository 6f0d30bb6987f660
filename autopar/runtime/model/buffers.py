"""Buffers that the forward pass both reads and writes: one rank's values must be those of all, or replicas drift apart.

As with DDP, all ranks take rank 0's, here at the end of each step. Which buffers these are is read off each rank's
graphs, and ranks may run different ones: so they tell each other, as they sum how much their batches count.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

from autopar.errors import AutoparWarning
from autopar.ir.buffers import read, read_and_written
from autopar.ir.capture import JointGraph
from autopar.runtime.job.process_group import Group


class SharedBuffers:
    """The buffers that are to be alike on all ranks, as these agree from step to step; there are ever more of them."""

    def __init__(self, group: Group, besides: Collection[str]) -> None:
        """`besides`: buffers that somebody else sees to, as the statistics of batch normalization."""
        self._group = group
        self._besides = besides
        self._unread: set[str] = set()
        """Buffers that graphs have written and not read."""
        self.agreed: frozenset[str] = frozenset()
        """Those that all ranks know of."""
        self.mine: frozenset[str] = frozenset()
        """These, and those of the graphs that this rank has run."""

    def of(self, joint: JointGraph) -> tuple[str, ...]:
        """Names of the buffers that a graph reads and writes, which are to be alike on all ranks; none with one rank.
        Warns, on rank 0."""
        if self._group.world_size == 1:
            return ()
        both = read_and_written(joint)
        self._unread |= {name for name, _ in joint.mutations}.difference(both, self._besides)
        if both:
            self._warn(
                f"the model reads and writes {_listed(both)} in its forward pass. As with DDP, all ranks take rank 0's "
                "values after each step, so what other ranks' batches would add is left out; one process would see all "
                "of it. Where that matters, sum over the ranks within forward"
            )
        return both

    def read_by(self, joint: JointGraph) -> frozenset[str]:
        """Names of the buffers that a graph reads, which may be written by others; none with one rank."""
        if self._group.world_size == 1:
            return frozenset()
        names = {name for kind, name in joint.inputs if kind == "buffer"}.difference(self._besides)
        return frozenset(read(joint, sorted(map(str, names))))

    def _warn(self, what: str) -> None:
        if self._group.rank == 0:
            warnings.warn(what, AutoparWarning, stacklevel=3)

    def __contains__(self, name: object) -> bool:
        return name in self.mine

    def run(self, names: Iterable[str], read: Iterable[str] = ()) -> str:
        """Is told of the buffers of graphs that are about to run, and of those that they `read`: what another graph has
        only written so far is to be alike from now on, too, which is said. Returns what ranks compare in a step."""
        late = tuple(sorted(self._unread.intersection(read).difference(self.mine, names)))
        if late:
            self._warn(
                f"the model reads {_listed(late)} now, which it has only written so far: each rank's is of its own "
                "batches in this step; as with DDP, all ranks take rank 0's behind it. Call "
                "program.synchronize_buffers() on all ranks before, and all have the mean"
            )
        self.mine = self.mine.union(names, late)
        return "\n".join(sorted(self.mine))

    def agree(self, texts: Sequence[str]) -> None:
        """Takes over what ranks have found that compared different things: from now on, all share each of them."""
        self.agreed = self.mine = frozenset(name for text in texts for name in text.split("\n") if name)

    def settle(self) -> list[str]:
        """Those that are to be shared behind the step, on all ranks the same: they have compared what each knew."""
        self.agreed = self.mine
        return sorted(self.agreed)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5]))
