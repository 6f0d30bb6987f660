"""Running statistics of normalization layers: each rank's own while a layer trains, and alike where they are read.

A layer that is put into evaluation mode in the middle of training normalizes by what each rank has seen: ranks would
compute different functions. As with DDP, all ranks take rank 0's statistics then, before the step's forward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from autopar.errors import AutoparWarning
from autopar.runtime.job.process_group import Group, take_from_rank_0
from autopar.runtime.sync_batch_norm import SyncedBatchNorm


class RunningStatistics:
    """The statistics of a program's layers, but for those that normalize over all ranks."""

    def __init__(self, owners: Iterable[nn.Module], group: Group) -> None:
        layers = dict.fromkeys(m for owner in owners for m in owner.modules() if isinstance(m, _NormBase))
        keeping = [m for m in layers if m.running_mean is not None and not isinstance(m, SyncedBatchNorm)]
        self._layers = keeping if group.world_size > 1 else []
        self._group = group
        self._apart: set[nn.Module] = set()
        """Layers that have trained since ranks last had the same statistics."""
        self._has_said = False

    def share(self) -> None:
        """Before a step or a forward pass: has ranks take rank 0's statistics of layers that are in evaluation mode
        now, and have trained. By all ranks together, whose layers are in the same modes."""
        read = [m for m in self._layers if m in self._apart and not m.training]
        if read:
            self._say(len(read))
            take_from_rank_0([b for m in read for b in m.buffers(recurse=False)], self._group, "running statistics")
        self._apart.difference_update(read)
        self._apart.update(m for m in self._layers if m.training)

    def are_alike(self) -> None:
        """Is told that ranks have the same statistics now."""
        self._apart.clear()

    def _say(self, count: int) -> None:
        if self._has_said or self._group.rank:
            return
        self._has_said = True
        warnings.warn(
            f"{count} normalization layer(s), which have trained, are in evaluation mode now: as with DDP, all ranks "
            "take rank 0's running statistics, so what other ranks have seen is left out. Call synchronize_buffers() "
            "on all ranks before, and they are averaged instead",
            AutoparWarning,
            stacklevel=3,
        )
