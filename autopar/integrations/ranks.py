"""What the integrations ask of the other ranks, over the process group that the framework has made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.api import optimize
from autopar.ir.batch import flatten
from autopar.runtime.job.process_group import Group, take_from_rank_0

Weight = Callable[[Any], float]
"""From a batch to how much its loss counts: of what the loss is a mean over, how much the batch has."""


def equal(batch: Any) -> float:
    """A weight: each rank's loss counts alike, as with `DistributedDataParallel`. For a loss that the script divides by
    a count of all ranks' batches, and multiplies with the number of ranks."""
    return 1.0


def samples(batch: Any) -> float:
    """A weight: the samples in a batch, as `Batch.size` says; 1 where it has none."""
    size = flatten(batch).size
    return 1.0 if size is None else float(size)


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sums(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The sum over the ranks of each number, by all ranks together."""
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(found)
    return found.tolist()


def share(own: float, total: float) -> float:
    """What this rank's loss is multiplied with, so that the plain mean over the ranks is the mean over all that counts:
    1 where all ranks have as much, or none has any."""
    return own * world_size() / total if total else 1.0


def as_patient(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `autopar.optimize`, with which ranks wait for a late one for as long as the framework has them wait,
    where that is longer than the default and the options do not say it."""
    default = inspect.signature(optimize).parameters["timeout_s"].default
    store: Any = dist.distributed_c10d._get_default_store()  # which has the timeout of the default process group
    return {"timeout_s": max(default, store.timeout.total_seconds()), **options}


def make_equal(tensors: Iterable[torch.Tensor]) -> None:
    """Gives every rank the values that rank 0 has, in place; by all ranks together."""
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    take_from_rank_0(tensors, group, "making the ranks' models equal")
