"""What one rank finds of its loss: what it has read off the graph, and what a run of a batch and of its parts shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.ir.batch import Batch, inputs_and_target
from autopar.ir.batch_weight import BatchWeight, UnreadWeight
from autopar.runtime.losses.findings import Finding, agreed_ratios
from autopar.runtime.losses.pairs import Lent, Pair, kind_of
from autopar.runtime.losses.probe import (
    FEW,
    NOT_ON_PARTS,
    PartLosses,
    may_be_time_first,
    part_losses,
    part_of,
    samples_of,
    side_by_side,
)


class Finder:
    """Looks at batches of one model and its loss; asks no other rank."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        given: Callable[[Any], Any] | None,
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """`given`: the user's `weight`, from a batch to how much it counts."""
        self.model = model
        self.loss_fn = loss_fn
        self.lent: Lent | None = None
        """Where batches have one sample, another one to look at beside it."""
        self.given = given
        self._buffers = buffers
        self._device = device

    def find(self, weight: BatchWeight, batch: Batch, twice: bool = True) -> Finding:
        """Looks at a batch and its loss. `twice`: whether it is seen, too, that the loss is the same once more."""
        if not batch.size:
            return Finding(0)
        losses: PartLosses | str = "its target has another number of samples than the rest of the batch"
        if self.targets(batch) in (None, batch.size):
            losses = part_losses(self.model, self.loss_fn, self._moved(batch), twice=twice)
        mean, total, seen = self._seen(weight, batch, losses)
        reads = self.given is not None or not isinstance(weight, UnreadWeight)
        dim = 0
        if mean is False and reads and may_be_time_first(self.model, batch):
            across = part_losses(self.model, self.loss_fn, self._moved(batch), 1, twice)
            fits, adds, how = self._seen(weight, batch, across)
            if fits is not False:
                losses, mean, total, seen, dim = across, fits, adds, how, 1
        kind = kind_of(batch, dim) if losses == FEW else ""
        pair = self.lent.beside(batch, self._device) if kind and self.lent is not None else None
        if pair is not None:
            losses = part_losses(self.model, self.loss_fn, pair.both, dim, twice)
            losses = f"of two samples put together, {losses}" if isinstance(losses, str) else losses
            mean, total, seen = self._seen(weight, batch, losses, pair)
        where = f" at {weight.where}" if weight.where else ""
        if self.given is not None:
            return Finding(batch.size, True, False, mean, total, (), "weight=", where, "", seen, kind=kind)
        may_be = (weight.is_mean, weight.is_sum)
        counts = self.ratios(weight, batch.tensors)
        if isinstance(losses, PartLosses) and weight.others and batch.listed is None:
            of_part = self.ratios(weight, samples_of(batch, losses.split) if pair is None else pair.lent)
            mean = None if agreed_ratios([counts, of_part]) is None else mean
        return Finding(
            batch.size,
            *may_be,
            mean,
            total,
            counts,
            weight.unit,
            where,
            weight.problem or "",
            seen,
            self._per_sample_of(weight, batch),
            self._unknown(weight, batch, mean, seen),
            seen if mean is None and reads and seen.startswith(NOT_ON_PARTS) else "",
            kind,
        )

    def _seen(
        self, weight: BatchWeight, batch: Batch, losses: PartLosses | str, pair: Pair | None = None
    ) -> tuple[bool | None, bool | None, str]:
        """Whether a loss looks like a mean, and like a sum, and what shows it, or why nothing does. `pair`: the batch's
        sample and another one, whose losses these are."""
        if isinstance(losses, str):
            return None, None, losses
        if pair is not None and losses.is_of_one():
            return None, None, FEW
        weights = self._of_parts(weight, batch, losses, pair)
        if weights is None:
            return None, None, ""
        split = losses.split
        adds = self.given is None and weight.is_sum and not weight.is_mean
        expected = sum(losses.parts) if adds else losses.mean(weights)
        if pair is None:
            of_what = f"on a batch of {split.samples} samples"
            parts = f"{split.first} of them by themselves and the other {split.samples - split.first}"
        else:
            of_what, parts = "of two samples put together", "what each loses by itself"
        seen = f"{of_what} it is {losses.whole:.6g}; {parts} would make it {expected:.6g}"
        return losses.is_mean(weights), losses.is_sum(), seen

    def _per_sample_of(self, weight: BatchWeight, batch: Batch) -> float | None:
        """How many units a sample has, where a graph has shown it and the shapes of a batch give it."""
        return float(self._of(weight, batch.tensors)) / (batch.size or 1) if by_shapes(weight, batch) else None

    def _unknown(self, weight: BatchWeight, batch: Batch, mean: bool | None, seen: str) -> str:
        """Why it is not known what a loss is a mean over that no graph shows; empty where a batch has shown it, or has
        too few samples to, or where the target has as many samples as the loss is a mean over."""
        if not isinstance(weight, UnreadWeight) or mean is not None:
            return ""
        if weight.unread:
            return weight.unread
        if seen == FEW:
            return ""
        targets = self.targets(batch)
        if targets is None:
            return seen if side_by_side(batch) else of_many_sizes(batch)
        return seen if side_by_side(batch) and targets == batch.size else ""

    def targets(self, batch: Batch) -> int | None:
        """Samples in the target of a loss function, which are what it takes the mean over: of a batch of graphs, the
        first tensor has a row for each of their nodes. `None` where no tensor of a target tells."""
        if self.loss_fn is None or batch.listed is not None:
            return None
        _, target = inputs_and_target(batch.rebuild(batch.tensors), True)
        tensors = (t for t in pytree.tree_leaves(target) if isinstance(t, torch.Tensor))
        return next((len(t) for t in tensors if t.dim()), None)

    def _moved(self, batch: Batch) -> Batch:
        return batch.to(self._device)

    def _of(self, weight: BatchWeight, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return weight.of(tensors, self._buffers, self._device)

    def _of_parts(
        self, weight: BatchWeight, batch: Batch, losses: PartLosses, pair: Pair | None
    ) -> tuple[float, float] | None:
        split, whole = losses.split, batch if pair is None else pair.both
        if self.given is not None:
            first, rest = (part_of(whole, rows, split.dim) for rows in split.parts)
            try:
                return float(self.given(first)), float(self.given(rest))
            except Exception:  # it need not know of parts
                return None
        if whole.listed is not None:  # its parts are of another structure than was captured
            return None if weight.unit != "samples" else (split.first, split.samples - split.first)
        count = float(self._of(weight, batch.tensors))
        if pair is not None:
            return float(self._of(weight, pair.lent)), count
        share = float(self._of(weight, samples_of(batch, split))) * split.first / split.samples
        return share, count - share

    def ratios(self, weight: BatchWeight, tensors: tuple[torch.Tensor, ...]) -> tuple[float | None, ...]:
        """Of a sum of means, each further count of a batch to the first one."""
        first, *others = (float(self._of(w, tensors)) for w in (weight, *weight.others))
        return tuple(None if other == first == 0 else math.inf if first == 0 else other / first for other in others)


def by_shapes(weight: BatchWeight, batch: Batch) -> bool:
    """Whether a graph shows how much a batch counts, by its shapes alone."""
    return not isinstance(weight, UnreadWeight) and weight.counted is None and batch.listed is None


def of_many_sizes(batch: Batch) -> str:
    sizes = ", ".join(str(len(t)) for t in batch.tensors if t.dim())
    return f"the model runs eagerly and the batch's tensors differ in dimension 0 ({sizes})"
