"""Buffers that the forward pass both reads and writes: one rank's values must be those of all, or replicas drift apart.

As with DDP, all ranks take rank 0's, here at the end of each step.
"""

from __future__ import annotations

import warnings

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
