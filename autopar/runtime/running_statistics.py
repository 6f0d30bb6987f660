"""Statistics of normalization layers: each rank's own while a layer trains, and alike where they are read.

Batch normalization normalizes each rank's batch by itself as it trains, as with DDP, which is said once. A layer that
is put into evaluation mode in the middle of training normalizes by what each rank has seen: ranks would compute
different functions. As with DDP, all ranks take rank 0's statistics then, before the step's forward pass.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase

from autopar.errors import AutoparWarning, CollectiveError, PlanMismatchError
from autopar.runtime.job.process_group import Group, take_from_rank_0
from autopar.runtime.job.together import gathered
from autopar.runtime.sync_batch_norm import SyncedBatchNorm

_HOW = "Switch normalization layers on all ranks in the same step: they train one function"


class RunningStatistics:
    """The statistics of a program's layers, but of those that normalize over all ranks, and what is said of them."""

    def __init__(self, owners: Mapping[str, nn.Module], group: Group) -> None:
        """`owners`: the modules that hold them, by the prefix of their names."""
        layers: dict[nn.Module, str] = {}
        for prefix, owner in owners.items():
            for name, m in owner.named_modules():
                if isinstance(m, _NormBase):
                    layers.setdefault(m, prefix + name)
        self._names = layers
        self.buffers = frozenset(f"{name}.{key}" for m, name in layers.items() for key, _ in m.named_buffers())
        """What they hold, by name."""
        own = [m for m in layers if group.world_size > 1 and not isinstance(m, (SyncedBatchNorm, SyncBatchNorm))]
        self._layers = [m for m in own if m.running_mean is not None]
        self._of_batches = [m for m in own if isinstance(m, _BatchNorm)]
        """Layers that normalize each rank's batch by itself while they train, until that was said."""
        self._group = group
        self._apart: set[nn.Module] = set()
        """Layers that have trained since ranks last had the same statistics."""
        self._has_said_taken = self._has_said_own = False

    def share(self) -> None:
        """Before a step or a forward pass: has ranks take rank 0's statistics of layers that are in evaluation mode
        now, and have trained. By all ranks together; raises `CollectiveError`, or `PlanMismatchError`, where the layers
        of another rank are in other modes."""
        if training := [m for m in self._of_batches if m.training]:
            self._of_batches = []
            self._say(
                f"{len(training)} batch normalization layer(s), the first is {training[0]}, normalize each rank's "
                "batch by itself, as with DDP: losses and gradients depend on how samples are shared out to ranks. "
                "With optimize(..., sync_batch_norm=True) they normalize over the batches of all ranks, as one process "
                "would"
            )
        read = self._read()
        if read:
            self._check_alike([self._names[m] for m in read])
            if not self._has_said_taken:
                self._has_said_taken = True
                self._say(
                    f"{len(read)} normalization layer(s), which have trained, are in evaluation mode now: as with DDP, "
                    "all ranks take rank 0's running statistics, so what other ranks have seen is left out. Call the "
                    "program's synchronize_buffers() on all ranks before, and they are averaged instead"
                )
            take_from_rank_0([b for m in read for b in m.buffers(recurse=False)], self._group, "running statistics")
        self._apart.difference_update(read)
        self._apart.update(m for m in self._layers if m.training)

    def tell_of_own(self) -> None:
        """Before a forward pass in evaluation mode that this rank may run alone: says once, on ranks whose statistics
        DDP would replace by rank 0's, that they are this rank's."""
        if self._group.rank and not self._has_said_own and (read := self._read()):
            self._has_said_own = True
            warnings.warn(
                f"rank {self._group.rank} evaluates {_listed([self._names[m] for m in read])} with the running "
                "statistics of its own batches, so that ranks predict differently; DDP would take rank 0's. Call "
                "module.program.synchronize_buffers() on all ranks before, and all have the mean",
                AutoparWarning,
                stacklevel=3,
            )

    def are_alike(self) -> None:
        """Is told that ranks have the same statistics now."""
        self._apart.clear()

    def _read(self) -> list[nn.Module]:
        """Layers that read their statistics now, of which ranks may have different ones."""
        return [m for m in self._layers if m in self._apart and not m.training]

    def _check_alike(self, mine: list[str]) -> None:
        """Raises unless all ranks are about to read the statistics of these layers."""
        rank, names = self._group.rank, _listed(mine)
        here = f"rank {rank} has put {names}, which has trained, into evaluation mode"
        try:
            texts = gathered(self._group, "running statistics", json.dumps(mine), here, _HOW)
        except CollectiveError as e:  # they wait in a step that this rank does not come to
            self._group.leave("a step without the statistics that this rank was to read", e)
            raise
        for other, theirs in enumerate(map(json.loads, texts)):
            if theirs != mine:
                raise PlanMismatchError(f"{here}, and rank {other} {_listed(theirs)}. {_HOW}")

    def _say(self, what: str) -> None:
        if self._group.rank == 0:
            warnings.warn(what, AutoparWarning, stacklevel=3)


def _listed(names: list[str]) -> str:
    return f"the normalization layer '{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
