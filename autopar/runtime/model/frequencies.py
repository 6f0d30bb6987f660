"""Embeddings that divide a row's gradient by how often the batch looks it up."""

from __future__ import annotations

import warnings
from typing import Any

from autopar.errors import AutoparWarning
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.eager import owners_of


def say_frequencies(model: Any, loss_fn: Any, group: Group) -> None:
    """Warns, on rank 0, where each rank divides by how often its own batch looks a row up."""
    modules = [(start + n, m) for start, owner in owners_of(model, loss_fn).items() for n, m in owner.named_modules()]
    names = [n for n, m in modules if getattr(m, "scale_grad_by_freq", False) is True]
    if names and group.world_size > 1 and group.rank == 0:
        warnings.warn(
            f"'{names[0]}' has scale_grad_by_freq=True: each rank divides a row's gradient by how often its own batch "
            "looks it up, as with DistributedDataParallel; one process would divide by how often the global batch does",
            AutoparWarning,
            stacklevel=4,
        )
