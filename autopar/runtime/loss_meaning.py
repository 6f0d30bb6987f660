"""What the loss of a program is to the global batch, settled by all ranks at their first step.

Each rank knows what it has read off its graph (`autopar.ir.weights`) and what its first batch shows
(`autopar.runtime.loss_probe`); they exchange both through the store. What one weight a batch cannot say is said once,
by rank 0.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparWarning
from autopar.ir.batch import Batch, inputs_and_target
from autopar.ir.batch_weight import BatchWeight, UnreadWeight
from autopar.runtime.loss_probe import PartLosses, first_samples, part_losses, part_of
from autopar.runtime.process_group import Rendezvous

_ADVICE = (
    "Where the loss is a mean over something else, pass weight=lambda batch: ..., one number: how much of it the batch "
    "has. Where it is a sum of means over different counts, have it return them as a dict, and weight= their counts; "
    "where it compares samples with each other (contrastive losses, negatives within the batch), have it compare those "
    "of all ranks: autopar.gather. Else, as with DistributedDataParallel, several ranks do not train as one process "
    "would"
)


@dataclass(frozen=True)
class Finding:
    """What one rank has read off its loss, and seen of it on its first batch."""

    samples: int
    may_be_mean: bool = True
    may_be_sum: bool = False
    looks_like_mean: bool | None = None
    """Whether the first batch's loss is the weighted mean of its parts' losses; `None` where that cannot be seen."""
    looks_like_sum: bool | None = None
    ratios: tuple[float | None, ...] = ()
    """Of a sum of means, each further count to the first one; `None` where the batch has nothing of both."""
    unit: str = "samples"
    where: str = ""
    """The loss's line in the user's code, as ` at file:line`."""
    problem: str = ""
    """Why one weight cannot say what the loss is, as far as the graph shows."""
    seen: str = ""
    """What the first batch has shown, or why it was not looked at."""


class LossMeaning:
    """How much each batch of a program with several ranks counts in the global loss."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        given: Callable[[Any], Any] | None,
        rendezvous: Rendezvous,
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """`given`: the user's `weight`, from a batch to how much it counts."""
        self.model = model
        self.loss_fn = loss_fn
        self.given = given
        self.is_sum = False
        """Whether the loss is a sum over the global batch: then the loss of every batch counts whole."""
        self._rendezvous = rendezvous
        self._buffers = buffers
        self._device = device
        self._by_samples = False
        self._settled = False
        self._said = False
        """Whether it has been said that one weight a batch does not give the gradient of one process."""
        self._ratios: tuple[float | None, ...] = ()
        """What ranks have agreed on, of a sum of means."""

    def take_as_sum(self) -> None:
        """Has each batch's loss count whole: it is made of the batch's shares in the global loss already."""
        self.given, self.is_sum, self._settled, self._said = None, True, True, True

    def take_as_samples(self) -> None:
        """Has each batch count by its samples, or as the user says, without looking at parts of it: the loss compares
        samples of all ranks."""
        self._settled = self._said = self._by_samples = True

    def weigh(self, weight: BatchWeight, batch: Batch, original: Any) -> torch.Tensor:
        """How much a batch counts where the loss is a mean: a float64 scalar on the program's device."""
        if self._by_samples and self.given is None:
            return torch.tensor(float(batch.size or 0), dtype=torch.float64, device=self._device)
        targets = self._targets(batch) if self.given is None and _is_unread(weight) else None
        if targets is not None:
            return torch.tensor(float(targets), dtype=torch.float64, device=self._device)
        if self.given is not None:
            return torch.tensor(float(self.given(original)), dtype=torch.float64, device=self._device)
        if not self._said and batch.size:
            self._hold_to_first(weight, batch)
        return weight.of_batch(batch, self._buffers, self._device).to(self._device)

    def settle(self, weights: Sequence[BatchWeight], batches: Sequence[Batch]) -> None:
        """Has all ranks agree on what the loss is, at the first step; `batches` are its micro-batches. Later calls do
        nothing. Warns on rank 0 where one weight a batch does not give the gradient of one process."""
        if self._settled:
            return
        self._settled = True
        weight, batch = next(
            ((w, b) for w, b in zip(weights, batches, strict=True) if b.size), (weights[0], batches[0])
        )
        mine = json.dumps(asdict(self.find(weight, batch)))
        theirs = self._rendezvous.exchange("loss", mine)
        everyone = [Finding(**json.loads(text)) for text in theirs]
        found = [f for f in everyone if f.samples]
        if not found:
            return
        if batch.listed is not None and any(f.unit == "samples" for f in found):
            self._by_samples = True  # ranks with one sample cannot tell its objects from samples
        self.is_sum, problem = conclude(found, len(everyone), self.given is not None)
        agreed = agreed_ratios([f.ratios for f in found])
        if problem is None and agreed is None:
            problem = _counts_differ(found[0])
        self._ratios = agreed or ()
        self._said = problem is not None
        if problem is not None and self._rendezvous.group.rank == 0:
            warnings.warn(problem, AutoparWarning, stacklevel=4)

    def find(self, weight: BatchWeight, batch: Batch) -> Finding:
        """Looks at a batch and its loss; asks no other rank."""
        if not batch.size:
            return Finding(0)
        losses: PartLosses | str = "its target has another number of samples than the rest of the batch"
        if self._targets(batch) in (None, batch.size):
            losses = part_losses(self.model, self.loss_fn, self._moved(batch))
        mean = total = None
        seen = losses if isinstance(losses, str) else ""
        weights = self._of_parts(weight, batch, losses) if isinstance(losses, PartLosses) else None
        if isinstance(losses, PartLosses) and weights is not None:
            mean, total = losses.is_mean(weights), losses.is_sum()
            adds = self.given is None and weight.is_sum and not weight.is_mean
            expected = sum(losses.parts) if adds else losses.mean(weights)
            seen = (
                f"on a batch of {losses.samples} samples it is {losses.whole:.6g}; {losses.first} of them by "
                f"themselves and the other {losses.samples - losses.first} would make it {expected:.6g}"
            )
        where = f" at {weight.where}" if weight.where else ""
        if self.given is not None:
            return Finding(batch.size, True, False, mean, total, (), "weight=", where, "", seen)
        may_be = (weight.is_mean, weight.is_sum)
        counts = self._of_counts(weight, batch.tensors)
        if isinstance(losses, PartLosses) and weight.others and batch.listed is None:
            of_part = self._of_counts(weight, first_samples(batch, losses.first))
            mean = None if agreed_ratios([counts, of_part]) is None else mean
        return Finding(batch.size, *may_be, mean, total, counts, weight.unit, where, weight.problem or "", seen)

    def _targets(self, batch: Batch) -> int | None:
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

    def _of_parts(self, weight: BatchWeight, batch: Batch, losses: PartLosses) -> tuple[float, float] | None:
        if self.given is not None:
            parts = (part_of(batch, 0, losses.first), part_of(batch, losses.first, losses.samples))
            try:
                return float(self.given(parts[0])), float(self.given(parts[1]))
            except Exception:  # it need not know of parts
                return None
        if batch.listed is not None:  # its parts are of another structure than was captured
            return None if weight.unit != "samples" else (losses.first, losses.samples - losses.first)
        whole = float(self._of(weight, batch.tensors))
        first = float(self._of(weight, first_samples(batch, losses.first))) * losses.first / losses.samples
        return first, whole - first

    def _of_counts(self, weight: BatchWeight, tensors: tuple[torch.Tensor, ...]) -> tuple[float | None, ...]:
        first, *others = (float(self._of(w, tensors)) for w in (weight, *weight.others))
        return tuple(None if other == first == 0 else math.inf if first == 0 else other / first for other in others)

    def _hold_to_first(self, weight: BatchWeight, batch: Batch) -> None:
        """Warns, on whichever rank sees it, where a later batch's loss is not what all ranks have settled on."""
        where = f" at {weight.where}" if weight.where else ""
        problem = None
        fits = weight.is_sum if self.is_sum else weight.is_mean
        if not fits:
            why = weight.problem or "is a sum over this batch, and a mean over the first one, or the other way around"
            problem = f"the loss{where} {why}. Each rank's batch counts as the first one did. {_ADVICE}"
        elif weight.others or self._ratios:
            agreed = agreed_ratios([self._ratios, self._of_counts(weight, batch.tensors)])
            self._ratios = agreed or ()
            problem = _counts_differ(Finding(1, unit=weight.unit, where=where)) if agreed is None else None
        if problem is not None:
            self._said = True
            warnings.warn(problem, AutoparWarning, stacklevel=5)


def _is_unread(weight: BatchWeight) -> bool:
    """Whether the graph does not say what the loss is a mean over."""
    return isinstance(weight, UnreadWeight) or weight.problem is not None


def conclude(found: Sequence[Finding], ranks: int, given: bool) -> tuple[bool, str | None]:
    """Whether the loss is a sum over the global batch, and what is to be said of it, from what all ranks with samples
    have found. Every rank concludes the same."""
    may_be_mean, may_be_sum = all(f.may_be_mean for f in found), all(f.may_be_sum for f in found)
    no_mean = next((f for f in found if f.looks_like_mean is False), None)
    no_sum = next((f for f in found if f.looks_like_sum is False), None)
    first = next((f for f in found if f.problem), found[0])
    if not may_be_mean and not may_be_sum:
        why = first.problem or "is a mean over the batch on some ranks, and a sum on others"
        return False, (
            f"the loss{first.where} {why}, so no weight of each rank's batch is sure to give the gradient of one "
            f"process on the global batch. Each counts by its samples. {_ADVICE}"
        )
    is_sum = may_be_sum and (not may_be_mean or (no_mean is not None and no_sum is None))
    misfit = no_sum if is_sum else no_mean
    if misfit is not None:
        counts = "whole, as a sum" if is_sum else "by what weight= returns" if given else f"by its {misfit.unit}"
        kind = "the sum of what its parts lose" if is_sum else "the mean of what its parts lose"
        return is_sum, (
            f"the loss{misfit.where} is not {kind}: {misfit.seen}. Each rank's batch counts {counts}, and the "
            f"gradient is not that of one process on the global batch. {_ADVICE}"
        )
    if is_sum and ranks > 1:
        return True, (
            f"the loss{first.where} is a sum over the batch, so the gradient is that of the sum over all ranks' "
            f"batches, as in one process. DistributedDataParallel would divide it by the number of ranks, {ranks}: "
            "mind this in the learning rate, or take the mean"
        )
    return is_sum, None


def agreed_ratios(found: Sequence[tuple[float | None, ...]]) -> tuple[float | None, ...] | None:
    """The ratios that all have; `None` where two differ."""
    if len({len(f) for f in found}) > 1:
        return None
    agreed: list[float | None] = []
    for column in zip(*found, strict=True):
        known = [r for r in column if r is not None]
        if any(not (r == known[0] or math.isclose(r, known[0], rel_tol=1e-9)) for r in known):
            return None
        agreed.append(known[0] if known else None)
    return tuple(agreed)


def _counts_differ(f: Finding) -> str:
    return (
        f"the loss{f.where} is a sum of means over different counts, which are not to each other on all ranks as on "
        f"this one. Each rank's batch counts by its {f.unit} alone, and the gradient of the other means is not that of "
        f"one process on the global batch. {_ADVICE}"
    )
