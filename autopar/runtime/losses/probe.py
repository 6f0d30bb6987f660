"""What a loss makes of a batch, seen by running it: on the whole batch, and on two parts of it.

A loss that treats samples one by one is the weighted mean of its values on the parts, or their sum. Contrastive losses,
negatives within the batch and other losses across samples are neither, whatever their graph looks like.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.batch import Batch
from autopar.ir.listed import chosen
from autopar.runtime.model.eager import loss_of, owners_of, without_trace
from autopar.runtime.model.generators import generators, same_generators

_TOLERANCES = {torch.float64: 1e-11, torch.float32: 3e-5}
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

_MOST_SPLITS = 4
"""Ways to take a batch apart that are tried, where a part loses nothing."""

FEW = "the batch has fewer than two samples"
NOT_ON_PARTS = "the model does not run on a part of the batch, or not without training mode"
_DRAWS = "the model draws random numbers"


@dataclass(frozen=True)
class Split:
    """Two parts of a batch: `first` of its samples, from `begin` on, and the others."""

    first: int
    samples: int
    begin: int = 0
    dim: int = 0
    """The dimension of the batch's tensors in which samples lie side by side."""

    @property
    def parts(self) -> tuple[tuple[range, ...], tuple[range, ...]]:
        """The samples of each part."""
        end = self.begin + self.first
        rest = (range(self.begin), range(end, self.samples))
        return (range(self.begin, end),), tuple(r for r in rest if r)


@dataclass(frozen=True)
class PartLosses:
    """The loss of a batch, and of its two parts."""

    whole: float
    parts: tuple[float, float]
    split: Split
    tolerance: float

    @property
    def says_nothing(self) -> bool:
        """Whether a part loses exactly nothing, as it does, too, where nothing of it counts in a mean: that is no sign
        of a sum."""
        return 0.0 in self.parts

    def is_sum(self) -> bool | None:
        """Whether the loss is the sum of those of the parts; `None` where that cannot be told."""
        near = self._is_near(sum(self.parts))
        return None if near and self.says_nothing else near

    def mean(self, weights: tuple[float, float]) -> float:
        """The mean of the parts' losses with these weights; a part of weight 0 counts as nothing, whatever its loss."""
        shares = [loss * w for loss, w in zip(self.parts, weights, strict=True) if w != 0]
        return sum(shares) / sum(weights) if shares else math.nan

    def is_mean(self, weights: tuple[float, float]) -> bool | None:
        """Whether the loss is that mean; `None` where that cannot be told."""
        near = self._is_near(self.mean(weights))
        return None if near and not any(self.parts) else near

    def is_of_one(self) -> bool:
        """Whether the loss is that of one part alone, as where a loss is made for batches of one sample."""
        near = [self._is_near(part) for part in self.parts]
        return near[0] is not near[1]

    def _is_near(self, other: float) -> bool | None:
        return _near(self.whole, other, self.parts, self.tolerance) if math.isfinite(other) else None


def part_losses(model: nn.Module, loss_fn: Any, batch: Batch, dim: int = 0, twice: bool = True) -> PartLosses | str:
    """Runs the model and its loss on a batch and on two parts of it, each time from the same state, without gradients,
    dropout and batch statistics, and leaves modes, buffers, attributes and random generators as they were. Returns, in
    words, why it cannot be told where that is so. Tensors whose dimension 0 is the number of samples are taken apart;
    others stay whole. With `dim` 1, as of sequences that lie side by side in that dimension, all are taken apart.
    `twice`: whether the whole batch is run once more, to see whether it loses the same."""
    size = _size(batch, dim)
    if size is None or size < 2:
        return FEW
    if batch.unseen:
        return "the batch holds objects that nobody can take apart"
    if not side_by_side(batch, dim):
        return "the batch's tensors are not all of one size, so it cannot be taken apart"
    first = next(k for k in range(max(1, size // 3), 0, -1) if size % k == 0)
    modules = [m for m in (model, loss_fn) if isinstance(m, nn.Module)]
    if any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for t in modules for m in t.modules()
    ):
        return "batch normalization without running statistics mixes samples"
    splits = [Split(first, size, begin, dim) for begin in range(0, size, first)][:_MOST_SPLITS]
    found: PartLosses | str = ""
    for everything in (False, True):
        try:
            found = _losses(model, loss_fn, batch, splits, everything, twice)
        except Exception as e:
            return f"{NOT_ON_PARTS}: {type(e).__name__}"
        if found != _DRAWS:
            break
    return found


def _losses(
    model: nn.Module, loss_fn: Any, batch: Batch, splits: list[Split], everything: bool, twice: bool
) -> PartLosses | str:
    """Of the first of these splits whose parts both lose something; of the last one, where none does."""
    modules = list(owners_of(model, loss_fn).values())
    drawn = False

    def run(part: Any) -> torch.Tensor:
        nonlocal drawn
        with _undisturbed(modules, everything), torch.no_grad():
            before = generators()
            loss = _loss(model, loss_fn, part)
            drawn |= not same_generators(before, generators())
        return loss

    one = run(batch.rebuild(batch.copied()))
    again = run(batch.rebuild(batch.copied())) if twice else one
    if drawn:
        return _DRAWS
    whole = float(one)
    if not math.isfinite(whole):
        return "the loss is not finite"
    tolerance = _tolerance(one, modules)
    if not _near(whole, float(again), (), tolerance):
        return (
            f"the same batch loses {whole:.6g} and, run once more, {float(again):.6g}: the model or the loss reads "
            "something that it changes, as an iterator, and that cannot be put back"
        )
    for split in splits:
        first, rest = (float(run(part_of(batch, rows, split.dim))) for rows in split.parts)
        if drawn:
            return _DRAWS
        found = PartLosses(whole, (first, rest), split, tolerance)
        if not found.says_nothing:
            break
    return found


def _tolerance(loss: torch.Tensor, modules: list[nn.Module]) -> float:
    kind, dtype = loss.device.type, loss.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    lowest = min((p.dtype for m in modules for p in m.parameters()), key=_bits, default=dtype)
    dtype = min(dtype, lowest, key=_bits)
    return _COARSE if kind != "cpu" and dtype == torch.float32 else _TOLERANCES.get(dtype, _COARSER)


def _near(a: float, b: float, others: tuple[float, ...], tolerance: float) -> bool:
    largest = max(abs(x) for x in (a, b, *others, _SMALL) if math.isfinite(x))
    return abs(a - b) <= tolerance * largest


def may_be_time_first(model: nn.Module, batch: Batch) -> bool:
    """Whether dimension 0 of a batch may be time, and dimension 1 its samples, as recurrent layers and attention take
    them by default."""
    return batch.listed is None and any(getattr(m, "batch_first", True) is False for m in model.modules())


def side_by_side(batch: Batch, dim: int = 0) -> bool:
    """Whether the batch lists its samples, or they are the rows of each of its tensors."""
    size = batch.size
    if dim:
        return len({t.shape[: dim + 1] for t in batch.tensors if t.dim()}) == 1
    return batch.listed is not None or all(
        not t.dim() or len(t) == size or (t.dim() > 1 and len(t) == 1) for t in batch.tensors
    )


def samples_of(batch: Batch, split: Split) -> tuple[torch.Tensor, ...]:
    """The batch's tensors, each sample replaced by one of the first part's, each as often: what adds up over samples is
    then as many times as large as for those alone. Their number divides that of all."""
    times, rest = divmod(split.samples, split.first)
    assert not rest
    (rows,), _ = split.parts
    return tuple(
        torch.cat([t.narrow(split.dim, rows.start, split.first)] * times, split.dim)
        if t.dim() and t.shape[split.dim] == split.samples
        else t
        for t in batch.tensors
    )


def part_of(batch: Batch, rows: Sequence[range], dim: int = 0) -> Any:
    """These samples, in the batch's structure; memory of their own."""
    if batch.listed is not None:
        return chosen(batch.rebuild(batch.copied()), batch.listed, [i for r in rows for i in r])
    size = _size(batch, dim)
    return batch.rebuild(
        tuple(_rows(t, rows, dim) if t.dim() and t.shape[dim] == size else t.clone() for t in batch.tensors)
    )


def _size(batch: Batch, dim: int) -> int | None:
    """How many samples lie side by side in a dimension."""
    return batch.size if not dim else next((t.shape[dim] for t in batch.tensors if t.dim() > dim), None)


def _rows(t: torch.Tensor, rows: Sequence[range], dim: int) -> torch.Tensor:
    pieces = [t.narrow(dim, r.start, len(r)) for r in rows]
    return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, dim)


def _loss(model: nn.Module, loss_fn: Any, part: Any) -> torch.Tensor:
    loss = loss_of(model, loss_fn, part)
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
