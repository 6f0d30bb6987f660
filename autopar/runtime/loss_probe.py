"""What a loss makes of a batch, seen by running it: on the whole batch, and on two parts of it.

A loss that treats samples one by one is the weighted mean of its values on the parts, or their sum. Contrastive losses,
negatives within the batch and other losses across samples are neither, whatever their graph looks like.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.batch import Batch
from autopar.ir.listed import chosen
from autopar.runtime.eager import loss_of, without_trace
from autopar.runtime.generators import generators, same_generators

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-5}
"""By which the loss and what its parts give may lie apart, relative to the largest of them: some ten times what parts
of other sizes differ by in roundoff. [Empirical]"""
_COARSE, _COARSER = 2e-3, 0.05
"""The same in float32 on GPUs, which may multiply in TF32, and in 16 bits."""
_SMALL = 1e-2
"""Losses below are compared as if they were this large: they may be what larger terms leave of each other."""
_RANDOM_OR_ACROSS_SAMPLES = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RReLU,
)
"""Modules that draw random numbers, or mix samples as `DistributedDataParallel` has them do, in training mode only;
attention and recurrent layers do with dropout."""


@dataclass(frozen=True)
class PartLosses:
    """The loss of a batch, and of its first `first` samples and of the others."""

    whole: float
    parts: tuple[float, float]
    first: int
    samples: int
    tolerance: float

    def is_sum(self) -> bool | None:
        """Whether the loss is the sum of those of the parts; `None` where they are not finite."""
        return self._is_near(sum(self.parts))

    def mean(self, weights: tuple[float, float]) -> float:
        """The mean of the parts' losses with these weights; a part of weight 0 counts as nothing, whatever its loss."""
        shares = [loss * w for loss, w in zip(self.parts, weights, strict=True) if w != 0]
        return sum(shares) / sum(weights) if shares else math.nan

    def is_mean(self, weights: tuple[float, float]) -> bool | None:
        """Whether the loss is that mean; `None` where it is not finite."""
        return self._is_near(self.mean(weights))

    def _is_near(self, other: float) -> bool | None:
        if not math.isfinite(other):
            return None
        largest = max(abs(x) for x in (self.whole, other, *self.parts, _SMALL) if math.isfinite(x))
        return abs(self.whole - other) <= self.tolerance * largest


def part_losses(model: nn.Module, loss_fn: Any, batch: Batch) -> PartLosses | str:
    """Runs the model and its loss on a batch and on two parts of it, without gradients, dropout and batch statistics,
    and leaves modes, buffers, attributes and random generators as they were. Returns, in words, why it cannot be told
    where that is so. Tensors whose dimension 0 is the number of samples are taken apart; others stay whole."""
    size = batch.size
    if size is None or size < 2:
        return "the batch has fewer than two samples"
    side_by_side = all(not t.dim() or len(t) == size or (t.dim() > 1 and len(t) == 1) for t in batch.tensors)
    if batch.listed is None and not side_by_side:
        return "the batch's tensors are not all of one size, so it cannot be taken apart"
    first = next(k for k in range(max(1, size // 3), 0, -1) if size % k == 0)
    modules = [m for m in (model, loss_fn) if isinstance(m, nn.Module)]
    if any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for t in modules for m in t.modules()
    ):
        return "batch normalization without running statistics mixes samples"
    reason = ""
    for everything in (False, True):
        try:
            with _undisturbed(modules, everything), torch.no_grad():
                before = generators()
                losses = [_loss(model, loss_fn, batch, *at) for at in ((0, size), (0, first), (first, size))]
                drawn = not same_generators(before, generators())
        except Exception as e:
            return f"the model does not run on a part of the batch, or not without training mode: {type(e).__name__}"
        if drawn:
            reason = "the model draws random numbers"
            continue
        whole, *parts = (float(x) for x in losses)
        if not math.isfinite(whole):
            return "the loss is not finite"
        dtype = losses[0].dtype
        if torch.is_autocast_enabled(losses[0].device.type):
            dtype = torch.get_autocast_dtype(losses[0].device.type)
        lowest = min((p.dtype for m in modules for p in m.parameters()), key=_bits, default=dtype)
        dtype = min(dtype, lowest, key=_bits)
        tolerance = _TOLERANCES.get(dtype, _COARSER)
        if losses[0].device.type != "cpu" and dtype == torch.float32:
            tolerance = _COARSE
        return PartLosses(whole, (parts[0], parts[1]), first, size, tolerance)
    return reason


def first_samples(batch: Batch, count: int) -> tuple[torch.Tensor, ...]:
    """The batch's tensors, each sample replaced by one of the first `count`, each as often: what adds up over samples
    is then as many times as large as for those alone. `count` divides the number of samples."""
    size = batch.size
    assert size is not None and size % count == 0
    return tuple(torch.cat([t[:count]] * (size // count)) if t.dim() and len(t) == size else t for t in batch.tensors)


def part_of(batch: Batch, begin: int, end: int) -> Any:
    """These samples, in the batch's structure; memory of their own."""
    if batch.listed is not None:
        return chosen(batch.rebuild(batch.copied()), batch.listed, range(begin, end))
    tensors = (t[begin:end] if t.dim() and len(t) == batch.size else t for t in batch.tensors)
    return batch.rebuild(tuple(t.clone() for t in tensors))


def _loss(model: nn.Module, loss_fn: Any, batch: Batch, begin: int, end: int) -> torch.Tensor:
    loss = loss_of(model, loss_fn, part_of(batch, begin, end))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ValueError("no scalar loss")
    return loss


@contextlib.contextmanager
def _undisturbed(modules: list[nn.Module], everything: bool) -> Iterator[None]:
    """While it is open, what draws random numbers or mixes samples is in evaluation mode, or every module is; then all
    is as before."""
    with without_trace({str(i): top for i, top in enumerate(modules)}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for m in (m for top in modules for m in top.modules()):
            drops = isinstance(m, (nn.MultiheadAttention, nn.RNNBase)) and m.dropout > 0
            if everything or drops or isinstance(m, _RANDOM_OR_ACROSS_SAMPLES):
                m.training = False
        yield


def _bits(dtype: torch.dtype) -> int:
    return dtype.itemsize
