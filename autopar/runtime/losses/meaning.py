"""What the loss of a program is to the global batch, settled by all ranks at their first step.

Each rank knows what it has read off its graph (`autopar.ir.weights`) and what its first batch shows
(`autopar.runtime.losses.probe`); they exchange both through the store. What one weight a batch cannot say is said once,
by rank 0.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparWarning
from autopar.ir.batch import Batch
from autopar.ir.batch_weight import BatchWeight, UnreadWeight
from autopar.runtime.compiled import Compiled
from autopar.runtime.job.process_group import Rendezvous
from autopar.runtime.losses.finder import Finder, by_shapes, of_many_sizes
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
from autopar.runtime.losses.pairs import OF_OTHER_KINDS, Lent, all_of_other_kinds, lend, lender
from autopar.runtime.losses.probe import side_by_side


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
        self.finder = Finder(model, loss_fn, given, buffers, device)
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
        self._shown: tuple[torch.Tensor, int] | None = None
        """How much this rank's batches count together, of those whose graph has shown it, and their samples."""
        self._has_targets = False
        """Whether a target has another number of samples than the rest of its batch."""

    def take_as_sum(self) -> None:
        """Has each batch's loss count whole: it is made of the batch's shares in the global loss already."""
        self.finder.given, self.is_sum, self._settled, self._said = None, True, True, True

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
        if self._by_samples and self.finder.given is None:
            return torch.tensor(float(batch.size or 0), dtype=torch.float64, device=self._device)
        if self.finder.given is not None:
            return torch.tensor(float(self.finder.given(original)), dtype=torch.float64, device=self._device)
        targets = self.finder.targets(batch) if _is_unread(weight) else None
        if not self._said and batch.size:
            self._hold_to_first(weight, batch, targets)
        if targets is None:
            count = weight.of_batch(batch, self._buffers, self._device)
        else:
            count = torch.tensor(float(targets), dtype=torch.float64)
        count = self._as_agreed(weight, batch, count).to(self._device)
        if weight.problem is None and batch.size:
            self._show(count, batch)
        elif weight.problem is not None and batch.size and (each := self._of_a_sample()) is not None:
            count = torch.full_like(count, each * (batch.size if targets is None else targets))
        return count

    def _show(self, count: torch.Tensor, batch: Batch) -> None:
        """Remembers how much a batch counts, of which a graph has shown it."""
        before, samples = self._shown or (torch.zeros_like(count), 0)
        targets = self.finder.targets(batch) if self._has_targets else None
        self._shown = before + count, samples + ((batch.size or 0) if targets is None else targets)

    def _of_a_sample(self) -> float | None:
        """How much a sample counts in the mean over these batches; `None` where they count as nothing."""
        shown, samples = self._shown or (torch.zeros(()), 0)
        return (float(shown) / samples or None) if samples else None

    def per_sample(self) -> float | None:
        """How much each sample of the batch that was weighed last counts; `None` where that is not known."""
        count, samples = self._last
        return float(count) / samples if samples else None

    def settle(
        self, captures: Sequence[Compiled], batches: Sequence[Batch], looks: LossLooks
    ) -> Callable[[], None] | None:
        """Has all ranks agree on what the loss is, at the first step; `batches` are its micro-batches. Warns on rank 0
        where one weight a batch does not give the gradient of one process. Later calls look at what was captured since,
        and now and then at a batch, and ask no other rank what it sees. Returns the latter look, which is to be taken
        before the step's update."""
        every = list(zip(captures, batches, strict=True))
        is_due = looks.begin_step()
        new = every if is_due else [(c, b) for c, b in every if not c.looked]
        for c in captures:
            c.looked = True
        if self._settled:
            if is_due:
                return lambda: self._look_again(new, looks, True)
            if new:
                self._look_again(new, looks, False)
            return None
        self._settled = True
        # Of the batch with the most samples, a graph shows the most.
        largest, batch = max(every, key=_size)
        if len(batches) > 1 and batch.size == 1:
            self.finder.lent = Lent.of(batches[0 if batch is not batches[0] else 1])
        if largest.weight.problem is None and batch.size:
            self._has_targets = self.finder.targets(batch) not in (None, batch.size)
            self._show(largest.weight.of_batch(batch, self._buffers, self._device), batch)
        with looks.whole(together=True):
            mine = self.finder.find(largest.weight, batch)
        everyone = self._of_two_samples(self._exchange("loss", mine), largest.weight, batch, looks)
        found = [f for f in everyone if f.samples]
        if not found:
            return None
        if batch.listed is not None and any(f.unit == "samples" for f in found):
            self._by_samples = True  # ranks with one sample cannot tell its objects from samples
        otherwise = None if self._by_samples or self.finder.given is not None else units_differ(everyone)
        if otherwise is not None:
            found = [replace(f, unit="samples") for f in found]
        self.is_sum, problem = conclude(found, len(everyone), self.finder.given is not None)
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
        return None

    def _exchange(self, topic: str, mine: Finding) -> list[Finding]:
        theirs = self._rendezvous.exchange(topic, json.dumps(asdict(mine)))
        return [Finding(**json.loads(text)) for text in theirs]

    def _of_two_samples(
        self, everyone: list[Finding], weight: BatchWeight, batch: Batch, looks: LossLooks
    ) -> list[Finding]:
        """What all ranks have found, each on its sample and another rank's where all of them have one. By all together;
        `everyone`: what they have found on their batches alone."""
        group, rank = self._rendezvous.group, lender(everyone)
        if rank is None:
            alone = isinstance(weight, UnreadWeight) and all_of_other_kinds(everyone)
            return [replace(f, unknown=f.unknown or OF_OTHER_KINDS) if alone else f for f in everyone]
        mine, tensors = everyone[group.rank], lend(batch, rank, group, self._device)
        with looks.whole(together=True) as is_whole:
            if mine.samples and tensors is not None:
                self.finder.lent = Lent(tensors, mine.kind, 0 if batch.size == 1 else 1)
                if is_whole and group.rank != rank:
                    mine = self.finder.find(weight, batch)
        return self._exchange("loss of two samples", mine)

    def units(self, weights: Sequence[BatchWeight], batches: Sequence[Batch]) -> tuple[str, str]:
        """In which units batches count, in words, for ranks to compare: on all ranks, as far as this one knows, and
        those of a step; both are empty where units do not matter."""
        if not self._settled or self._by_samples or self.is_sum or self.finder.given is not None:
            return "", ""
        known = [w for w, b in zip(weights, batches, strict=True) if b.size and not (w.problem and self._of_a_sample())]
        here = " and ".join(sorted({w.unit for w in known}))
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
        problem = self._misfit(weight, batch, twice=False)
        if problem is not None:  # unless the same batch loses something else each time, which only a second run shows
            problem = self._misfit(weight, batch, twice=True)
        if problem is not None:
            self._said = True
            warnings.warn(problem, AutoparWarning, stacklevel=6)

    def _misfit(self, weight: BatchWeight, batch: Batch, twice: bool) -> str | None:
        """What a look at a batch shows that its loss is not what it counts as; `twice` as in `Finder.find`."""
        return misfit([self.finder.find(weight, batch, twice)], self.is_sum, self.finder.given is not None)

    def _as_agreed(self, weight: BatchWeight, batch: Batch, count: torch.Tensor) -> torch.Tensor:
        """How much a batch counts, of which a graph has shown `count`: where it has shown too little, as the batches
        did on which ranks have agreed."""
        if self._per_sample is None or not by_shapes(weight, batch) or not batch.size:
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
        return self.finder.given is not None or (weight.is_sum if self.is_sum else weight.is_mean)

    def _hold_to_first(self, weight: BatchWeight, batch: Batch, targets: int | None) -> None:
        """Warns, on whichever rank sees it, where a later batch's loss is not what all ranks have settled on.
        `targets`: how many a batch has whose loss no graph shows."""
        where = f" at {weight.where}" if weight.where else ""
        problem = None
        if isinstance(weight, UnreadWeight) and targets is None and not side_by_side(batch):
            problem = not_known(of_many_sizes(batch))
        if not self._fits(weight):
            why = weight.problem or "is a sum over this batch, and a mean over the first one, or the other way around"
            each = "" if self._of_a_sample() is None else ", each as much as in other batches of this rank"
            counts = f"by its samples{each}" if weight.problem else "as the first one"
            problem = f"the loss{where} {why}. This batch counts {counts}. {ADVICE}"
        elif weight.others or self._ratios:
            agreed = agreed_ratios([self._ratios, self.finder.ratios(weight, batch.tensors)])
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
