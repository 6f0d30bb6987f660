"""What the loss of a program is to the global batch, settled by all ranks at their first step.

Each rank knows what it has read off its graph (`autopar.ir.weights`) and what its first batch shows
(`autopar.runtime.losses.probe`); they exchange both through the store. What one weight a batch cannot say is said once,
by rank 0.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparWarning
from autopar.ir.batch import Batch, inputs_and_target
from autopar.ir.batch_weight import BatchWeight, UnreadWeight
from autopar.runtime.compiled import Compiled
from autopar.runtime.job.process_group import Rendezvous
from autopar.runtime.losses.findings import (
    ADVICE,
    Finding,
    PerSample,
    agreed_ratios,
    conclude,
    counts_differ,
    has_no_weight,
    misfit,
    not_known,
    not_seen,
    units_differ,
    units_differ_since,
)
from autopar.runtime.losses.looks import LossLooks
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
        self._per_sample: PerSample | None = None
        self._said_per_sample = False
        self._units = ""
        """In which batches have counted last."""
        self._last: tuple[torch.Tensor, int] = torch.zeros(()), 0
        """How much the last batch counts, and its samples."""

    def take_as_sum(self) -> None:
        """Has each batch's loss count whole: it is made of the batch's shares in the global loss already."""
        self.given, self.is_sum, self._settled, self._said = None, True, True, True

    def take_as_samples(self) -> None:
        """Has each batch count by its samples, or as the user says, without looking at parts of it: the loss compares
        samples of all ranks."""
        self._settled = self._said = self._by_samples = True

    def weigh(self, weight: BatchWeight, batch: Batch, original: Any) -> torch.Tensor:
        """How much a batch counts where the loss is a mean: a float64 scalar on the program's device."""
        found = self._weight(weight, batch, original)
        self._last = found, batch.size or 0
        return found

    def _weight(self, weight: BatchWeight, batch: Batch, original: Any) -> torch.Tensor:
        if self._by_samples and self.given is None:
            return torch.tensor(float(batch.size or 0), dtype=torch.float64, device=self._device)
        if self.given is not None:
            return torch.tensor(float(self.given(original)), dtype=torch.float64, device=self._device)
        targets = self._targets(batch) if _is_unread(weight) else None
        if not self._said and batch.size:
            self._hold_to_first(weight, batch, targets)
        if targets is None:
            count = weight.of_batch(batch, self._buffers, self._device)
        else:
            count = torch.tensor(float(targets), dtype=torch.float64)
        return self._as_agreed(weight, batch, count).to(self._device)

    def per_sample(self) -> float | None:
        """How much each sample of the batch that was weighed last counts; `None` where that is not known."""
        count, samples = self._last
        return float(count) / samples if samples else None

    def settle(self, captures: Sequence[Compiled], batches: Sequence[Batch], looks: LossLooks) -> None:
        """Has all ranks agree on what the loss is, at the first step; `batches` are its micro-batches. Warns on rank 0
        where one weight a batch does not give the gradient of one process. Later calls look at what was captured since,
        and now and then at a batch, and ask no other rank what it sees."""
        every = list(zip(captures, batches, strict=True))
        is_due = looks.begin_step()
        new = every if is_due else [(c, b) for c, b in every if not c.looked]
        for c in captures:
            c.looked = True
        if self._settled:
            if new:
                self._look_again(new, looks, is_due)
            return
        self._settled = True
        # Of the batch with the most samples, a graph shows the most.
        largest, batch = max(every, key=_size)
        with looks.whole(together=True):
            mine = json.dumps(asdict(self.find(largest.weight, batch)))
        theirs = self._rendezvous.exchange("loss", mine)
        everyone = [Finding(**json.loads(text)) for text in theirs]
        found = [f for f in everyone if f.samples]
        if not found:
            return
        if batch.listed is not None and any(f.unit == "samples" for f in found):
            self._by_samples = True  # ranks with one sample cannot tell its objects from samples
        otherwise = None if self._by_samples or self.given is not None else units_differ(everyone)
        if otherwise is not None:
            found = [replace(f, unit="samples") for f in found]
        self.is_sum, problem = conclude(found, len(everyone), self.given is not None)
        if not self.is_sum:
            problem = problem or otherwise
            self._by_samples |= otherwise is not None or has_no_weight(found)
            self._per_sample = PerSample.agreed(found)
        agreed = agreed_ratios([f.ratios for f in found])
        if problem is None and agreed is None:
            problem = counts_differ(found[0])
        self._ratios = agreed or ()
        self._said = problem is not None
        problem = problem or not_seen(found, self.is_sum)  # which is less than what later batches may show
        if problem is not None and self._rendezvous.group.rank == 0:
            warnings.warn(problem, AutoparWarning, stacklevel=4)

    def units(self, weights: Sequence[BatchWeight], batches: Sequence[Batch]) -> tuple[str, str]:
        """In which units batches count, in words, for ranks to compare: on all ranks, as far as this one knows, and
        those of a step; both are empty where units do not matter."""
        if not self._settled or self._by_samples or self.is_sum or self.given is not None:
            return "", ""
        here = " and ".join(sorted({w.unit for w, b in zip(weights, batches, strict=True) if b.size}))
        self._units = here or self._units
        return self._units, here

    def agree_again(self, units: Sequence[str]) -> None:
        """Has batches count by their samples from the next step on, where ranks have counted in these units, and warns
        on rank 0. By all ranks together; `units`: by rank, empty where its batches were."""
        found = {u for u in units if u}
        if len(found) == 1:
            (self._units,) = found
        if self._by_samples or len(found) < 2:
            return
        self._by_samples = self._said = True
        if self._rendezvous.group.rank == 0:
            warnings.warn(units_differ_since(units), AutoparWarning, stacklevel=2)

    def _look_again(self, new: Sequence[tuple[Compiled, Batch]], looks: LossLooks, is_due: bool) -> None:
        """Looks at the largest of some batches: a term of the loss may have come since. `is_due`: whether all ranks do,
        rather than those that have captured the model again, for something other than a batch's sizes."""
        with looks.whole(is_due) as is_whole:
            able = [each for each in new if is_whole and not each[0].joint.sums_over_ranks]
            for c, b in [max(able, key=_size)] if is_due and able else able:
                if not self._said:
                    self._hold_to_parts(c.weight, b)

    def _hold_to_parts(self, weight: BatchWeight, batch: Batch) -> None:
        """Warns, on whichever rank sees it, where the loss of a batch is not what it counts as."""
        if not self._fits(weight):
            return  # said as it is weighed
        problem = misfit([self.find(weight, batch)], self.is_sum, self.given is not None)
        if problem is not None:
            self._said = True
            warnings.warn(problem, AutoparWarning, stacklevel=6)

    def find(self, weight: BatchWeight, batch: Batch) -> Finding:
        """Looks at a batch and its loss; asks no other rank."""
        if not batch.size:
            return Finding(0)
        losses: PartLosses | str = "its target has another number of samples than the rest of the batch"
        if self._targets(batch) in (None, batch.size):
            losses = part_losses(self.model, self.loss_fn, self._moved(batch))
        mean, total, seen = self._seen(weight, batch, losses)
        reads = self.given is not None or not isinstance(weight, UnreadWeight)
        if mean is False and reads and may_be_time_first(self.model, batch):
            across = part_losses(self.model, self.loss_fn, self._moved(batch), dim=1)
            fits, adds, how = self._seen(weight, batch, across)
            if fits is not False:
                losses, mean, total, seen = across, fits, adds, how
        where = f" at {weight.where}" if weight.where else ""
        if self.given is not None:
            return Finding(batch.size, True, False, mean, total, (), "weight=", where, "", seen)
        may_be = (weight.is_mean, weight.is_sum)
        counts = self._of_counts(weight, batch.tensors)
        if isinstance(losses, PartLosses) and weight.others and batch.listed is None:
            of_part = self._of_counts(weight, samples_of(batch, losses.split))
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
        )

    def _seen(
        self, weight: BatchWeight, batch: Batch, losses: PartLosses | str
    ) -> tuple[bool | None, bool | None, str]:
        """Whether a loss looks like a mean, and like a sum, and what shows it, or why nothing does."""
        if isinstance(losses, str):
            return None, None, losses
        weights = self._of_parts(weight, batch, losses)
        if weights is None:
            return None, None, ""
        split = losses.split
        adds = self.given is None and weight.is_sum and not weight.is_mean
        expected = sum(losses.parts) if adds else losses.mean(weights)
        seen = (
            f"on a batch of {split.samples} samples it is {losses.whole:.6g}; {split.first} of them by "
            f"themselves and the other {split.samples - split.first} would make it {expected:.6g}"
        )
        return losses.is_mean(weights), losses.is_sum(), seen

    def _per_sample_of(self, weight: BatchWeight, batch: Batch) -> float | None:
        """How many units a sample has, where a graph has shown it and the shapes of a batch give it."""
        return float(self._of(weight, batch.tensors)) / (batch.size or 1) if _by_shapes(weight, batch) else None

    def _unknown(self, weight: BatchWeight, batch: Batch, mean: bool | None, seen: str) -> str:
        """Why it is not known what a loss is a mean over that no graph shows; empty where a batch has shown it, or has
        too few samples to, or where the target has as many samples as the loss is a mean over."""
        if not isinstance(weight, UnreadWeight) or mean is not None:
            return ""
        if weight.unread:
            return weight.unread
        if seen == FEW:
            return ""
        targets = self._targets(batch)
        if targets is None:
            return seen if side_by_side(batch) else _of_many_sizes(batch)
        return seen if side_by_side(batch) and targets == batch.size else ""

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
        split = losses.split
        if self.given is not None:
            first, rest = (part_of(batch, rows, split.dim) for rows in split.parts)
            try:
                return float(self.given(first)), float(self.given(rest))
            except Exception:  # it need not know of parts
                return None
        if batch.listed is not None:  # its parts are of another structure than was captured
            return None if weight.unit != "samples" else (split.first, split.samples - split.first)
        whole = float(self._of(weight, batch.tensors))
        share = float(self._of(weight, samples_of(batch, split))) * split.first / split.samples
        return share, whole - share

    def _of_counts(self, weight: BatchWeight, tensors: tuple[torch.Tensor, ...]) -> tuple[float | None, ...]:
        first, *others = (float(self._of(w, tensors)) for w in (weight, *weight.others))
        return tuple(None if other == first == 0 else math.inf if first == 0 else other / first for other in others)

    def _as_agreed(self, weight: BatchWeight, batch: Batch, count: torch.Tensor) -> torch.Tensor:
        """How much a batch counts, of which a graph has shown `count`: where it has shown too little, as the batches
        did on which ranks have agreed."""
        if self._per_sample is None or not _by_shapes(weight, batch) or not batch.size:
            return count
        agreed = self._per_sample.of(float(count), batch.size)
        if agreed == float(count):
            return count
        if not self._said and not self._said_per_sample:
            self._said_per_sample = True
            where = f" at {weight.where}" if weight.where else ""
            finding = Finding(batch.size, unit=weight.unit, where=where)
            warnings.warn(self._per_sample.said(finding), AutoparWarning, stacklevel=5)
        return torch.full_like(count, agreed)

    def _fits(self, weight: BatchWeight) -> bool:
        """Whether a loss may be the sum, or the mean, that ranks have agreed on."""
        return self.given is not None or (weight.is_sum if self.is_sum else weight.is_mean)

    def _hold_to_first(self, weight: BatchWeight, batch: Batch, targets: int | None) -> None:
        """Warns, on whichever rank sees it, where a later batch's loss is not what all ranks have settled on.
        `targets`: how many a batch has whose loss no graph shows."""
        where = f" at {weight.where}" if weight.where else ""
        problem = None
        if isinstance(weight, UnreadWeight) and targets is None and not side_by_side(batch):
            problem = not_known(_of_many_sizes(batch))
        if not self._fits(weight):
            why = weight.problem or "is a sum over this batch, and a mean over the first one, or the other way around"
            problem = f"the loss{where} {why}. Each rank's batch counts as the first one did. {ADVICE}"
        elif weight.others or self._ratios:
            agreed = agreed_ratios([self._ratios, self._of_counts(weight, batch.tensors)])
            self._ratios = agreed or ()
            problem = counts_differ(Finding(1, unit=weight.unit, where=where)) if agreed is None else None
        if problem is not None:
            self._said = True
            warnings.warn(problem, AutoparWarning, stacklevel=5)


def _size(each: tuple[Compiled, Batch]) -> int:
    return each[1].size or 0


def _is_unread(weight: BatchWeight) -> bool:
    """Whether the graph does not say what the loss is a mean over."""
    return isinstance(weight, UnreadWeight) or weight.problem is not None


def _by_shapes(weight: BatchWeight, batch: Batch) -> bool:
    """Whether a graph shows how much a batch counts, by its shapes alone."""
    return not isinstance(weight, UnreadWeight) and weight.counted is None and batch.listed is None


def _of_many_sizes(batch: Batch) -> str:
    sizes = ", ".join(str(len(t)) for t in batch.tensors if t.dim())
    return f"the model runs eagerly and the batch's tensors differ in dimension 0 ({sizes})"
