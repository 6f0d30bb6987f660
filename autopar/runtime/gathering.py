"""`autopar.gather`: all ranks' rows of a tensor, with gradients, for losses that compare samples with each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.backends import collectives
from autopar.backends.across import gather_rows
from autopar.errors import CaptureError, SignatureError
from autopar.ir.batch import Batch
from autopar.ir.held_tensors import held_tensors
from autopar.runtime.job.process_group import Group
from autopar.runtime.sync_batch_norm import own_channel


@dataclass(frozen=True)
class _Ranks:
    """The ranks of the step that runs, or is captured, now."""

    group: str
    rank: int
    sizes: tuple[int, ...]
    """Samples of each rank's batch."""


_now: list[_Ranks] = []
"""At most one: set while a step of several ranks is captured or run."""


def gather(x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, in the order of ranks: [samples of this rank, ...] becomes [samples of all ranks, ...].

    For the model or the loss of `program.step`, and the model of a drop-in module: contrastive losses and negatives
    within the batch then compare samples of the global batch. Gradients flow back to the ranks that the rows come from,
    and are those of one process. With one rank, and where nothing is trained, as in evaluation, it is `x` itself.

    Raises `CaptureError` where `x` has not a row for each sample of this rank's batch, and outside of a step.
    """
    if not _now:
        if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise CaptureError(
                "autopar.gather works in the model or the loss of program.step, and in the model of a drop-in module, "
                "where they are captured. Here it was called outside of them, or by a model that runs eagerly: leave "
                "capture='never' out, or gather with torch.distributed.nn.functional.all_gather"
            )
        return x
    ranks = _now[0]
    if x.dim() == 0 or x.shape[0] != ranks.sizes[ranks.rank]:
        raise CaptureError(
            f"autopar.gather takes a tensor with a row for each of the batch's {ranks.sizes[ranks.rank]} samples, got "
            f"shape {tuple(x.shape)}"
        )
    found: torch.Tensor = gather_rows(x, list(ranks.sizes), ranks.group)
    return found


@contextlib.contextmanager
def gathering(group: Group, sizes: tuple[int, ...]) -> Iterator[None]:
    """While it is open, `gather` gathers over these ranks, whose batches have `sizes` samples; empty: it does not."""
    before = list(_now)
    _now[:] = [_Ranks(own_channel(group), group.rank, sizes)] if sizes else []
    try:
        yield
    finally:
        _now[:] = before


def gathered_as_it_is(model: nn.Module, batch: Batch, weight: float, group: Group) -> Any:
    """The output of a drop-in module that trains nothing, run as it is; `weight`: how much the batch counts. What other
    ranks' losses bring to this rank's inputs counts as their batches do beside this one, as in training. The backward
    pass holds on to the `group`, in which gradients are gathered."""

    def hooked(t: torch.Tensor, by: float) -> torch.Tensor:
        def scaled(gradient: torch.Tensor, _: Group = group) -> torch.Tensor:
            return gradient * by

        if t.requires_grad and not t.is_leaf:
            t.register_hook(scaled)  # type: ignore[no-untyped-call]
        return t

    taken = tuple(hooked(t.view_as(t), 1 / weight) if weight else t for t in batch.tensors)
    output = model(**batch.rebuild(taken))
    for t in held_tensors(output):
        hooked(t, weight)
    return output


def sizes_of(own: int | None, group: Group, device: torch.device) -> tuple[int, ...]:
    """The number of samples in each rank's batch; by all ranks together. Empty with one rank."""
    if group.name is None:
        return ()
    sizes = torch.zeros(group.world_size, dtype=torch.int64, device=device)
    sizes[group.rank] = own or 0
    with group.guard("comparing the sizes of batches"):
        return tuple(collectives.wait(collectives.all_reduce(sizes, group.name)).tolist())


def gathered_sizes(batches: Sequence[Batch], group: Group, device: torch.device) -> tuple[int, ...]:
    """The number of samples in each rank's batch of a step that gathers; by all ranks together. Raises `SignatureError`
    where a rank has several."""
    if len(batches) > 1:
        raise SignatureError("autopar.gather: samples of several micro-batches cannot be compared with each other")
    return sizes_of(batches[0].size, group, device)
