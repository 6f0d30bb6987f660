"""What ranks conclude of their loss from what each has found on its first batch. All of them conclude the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ADVICE = (
    "Where the loss is a mean over something else, pass weight=lambda batch: ..., one number: how much of it the batch "
    "has. Where it is a sum of means over different counts, have it return them as a dict, and weight= their counts; "
    "where it compares samples with each other (contrastive losses, negatives within the batch), have it compare those "
    "of all ranks: autopar.gather. Else, as with DistributedDataParallel, several ranks do not train as one process "
    "would"
)
PASS_WEIGHT = (
    "Where the loss is a mean over something else, pass weight=lambda batch: ..., one number: how much of it the batch "
    "has"
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
    per_sample: float | None = None
    """How many units a sample has, where the batch's shapes give them; `None` where its values do."""
    unknown: str = ""
    """Where neither a graph nor the first batch says what the loss is a mean over, why not."""
    unseen: str = ""
    """Where a graph says it, and nothing shows whether samples are compared with each other, why not."""
    kind: str = ""
    """Of a batch of one sample, what it has in common with those that it can be put together with; else empty."""


def conclude(found: Sequence[Finding], ranks: int, given: bool) -> tuple[bool, str | None]:
    """Whether the loss is a sum over the global batch, and what is to be said of it, from what all ranks with samples
    have found."""
    if has_no_weight(found):
        first = next((f for f in found if f.problem), found[0])
        why = first.problem or "is a mean over the batch on some ranks, and a sum on others"
        return False, (
            f"the loss{first.where} {why}, so no weight of each rank's batch is sure to give the gradient of one "
            f"process on the global batch. Each counts by its samples. {ADVICE}"
        )
    seen_sum = any(f.looks_like_sum for f in found) and not any(f.looks_like_sum is False for f in found)
    no_mean = any(f.looks_like_mean is False for f in found)
    is_sum = all(f.may_be_sum for f in found) and (not all(f.may_be_mean for f in found) or (no_mean and seen_sum))
    problem = misfit(found, is_sum, given)
    if problem is None and is_sum and ranks > 1:
        problem = (
            f"the loss{found[0].where} is a sum over the batch, so the gradient is that of the sum over all ranks' "
            f"batches, as in one process. DistributedDataParallel would divide it by the number of ranks, {ranks}: "
            "mind this in the learning rate, or take the mean"
        )
    if problem is None and not any(f.looks_like_mean for f in found):
        unknown = next((f.unknown for f in found if f.unknown), None)
        problem = None if unknown is None else not_known(unknown)
    return is_sum, problem


def has_no_weight(found: Sequence[Finding]) -> bool:
    """Whether no weight of a batch says what the loss is: it is neither a mean on all ranks nor a sum on all."""
    return not all(f.may_be_mean for f in found) and not all(f.may_be_sum for f in found)


def misfit(found: Sequence[Finding], is_sum: bool, given: bool) -> str | None:
    """What is to be said where a batch has shown that the loss is not what it counts as."""
    f = next((f for f in found if (f.looks_like_sum if is_sum else f.looks_like_mean) is False), None)
    if f is None:
        return None
    counts = "whole, as a sum" if is_sum else "by what weight= returns" if given else f"by its {f.unit}"
    kind = "the sum of what its parts lose" if is_sum else "the mean of what its parts lose"
    return (
        f"the loss{f.where} is not {kind}: {f.seen}. Each rank's batch counts {counts}, and the gradient is not that "
        f"of one process on the global batch. {ADVICE}"
    )


def not_known(why: str) -> str:
    """What is said where nothing shows what the loss is a mean over."""
    return (
        f"what the loss is a mean over is not known: {why}. Each rank's batch counts by its samples (the dicts of a "
        f"list of dicts, else dimension 0 of the first tensor of loss_fn's target, or of the batch where there is "
        f"none). {PASS_WEIGHT}"
    )


def not_seen(found: Sequence[Finding], is_sum: bool) -> str | None:
    """What is said where a graph shows what the loss counts by, and nothing whether it is what its parts lose."""
    f = next((f for f in found if f.unseen), None)
    if f is None or any(f.looks_like_sum if is_sum else f.looks_like_mean for f in found):
        return None
    counts = "whole, as a sum" if is_sum else f"by its {f.unit}"
    return (
        f"whether the loss{f.where} compares samples with each other cannot be seen: {f.unseen}. Each rank's batch "
        f"counts {counts}. {ADVICE}"
    )


def units_differ(everyone: Sequence[Finding]) -> str | None:
    """What is to be said where ranks have read different units off one loss; `None` where they have not. `everyone`: by
    rank."""
    found = [(rank, f) for rank, f in enumerate(everyone) if f.samples]
    (rank, first), *_ = found
    other = next(((r, f) for r, f in found if f.unit != first.unit), None)
    names = first.unit, "" if other is None else other[1].unit
    if other is None:
        several = [(r, f) for r, f in found if f.samples > 1]
        if several and all(f.per_sample == 1 for _, f in several):
            other = next(((r, f) for r, f in found if f.samples == 1 and f.per_sample not in (None, 1)), None)
            (rank, first), names = several[0], ("samples", first.unit)
    if other is None:
        return None
    return (
        f"the loss{first.where} is a mean over {names[0]} on rank {rank}, whose batch has {_samples(first.samples)}, "
        f"and over {names[1]} on rank {other[0]}, with {_samples(other[1].samples)}, as far as their graphs show. Each "
        f"rank's batch counts by its samples. {PASS_WEIGHT}"
    )


def units_differ_since(units: Sequence[str]) -> str:
    """What is said where ranks have counted a step's batches in different units. `units`: by rank."""
    (rank, unit), *others = ((r, u) for r, u in enumerate(units) if u)
    other, another = next((r, u) for r, u in others if u != unit)
    return (
        f"the loss of this step is a mean over {unit} on rank {rank}, and over {another} on rank {other}, as far as "
        "their graphs show: its gradient is not that of one process on the global batch. From the next step on, each "
        f"rank's batch counts by its samples. {PASS_WEIGHT}"
    )


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


def counts_differ(f: Finding) -> str:
    """What is said where a sum of means has counts that are not to each other as on other ranks."""
    return (
        f"the loss{f.where} is a sum of means over different counts, which are not to each other on all ranks as on "
        f"this one. Each rank's batch counts by its {f.unit} alone, and the gradient of the other means is not that of "
        f"one process on the global batch. {ADVICE}"
    )


@dataclass(frozen=True)
class PerSample:
    """How many units a sample has on all ranks, for batches of whose shapes a graph shows less.

    A batch of one sample does not show which of a value's dimensions are the samples': `x.squeeze().mean(-1)` is a mean
    over each sample, and of a batch of one over all of it.
    """

    units: float
    of_one: bool
    """Whether all ranks' batches had one sample."""

    @classmethod
    def agreed(cls, found: Sequence[Finding]) -> PerSample | None:
        """What ranks with samples agree on; `None` where there is nothing to hold later batches to."""
        several = [f for f in found if f.samples > 1]
        units = {f.per_sample for f in several or found}
        one = units.pop()
        if units or one is None or (one == 1) is not bool(several):
            return None
        return cls(one, not several)

    def of(self, count: float, samples: int) -> float:
        """How much a later batch counts, of which a graph has shown `count` units."""
        unsure = count == samples > 1 if self.of_one else samples == 1
        return self.units * samples if unsure else count

    def said(self, f: Finding) -> str:
        """What is said of such a batch."""
        return (
            f"the loss{f.where} is a mean over {f.unit}, and a batch of one sample does not show of how many a sample "
            f"consists. A batch of {_samples(f.samples)} counts as {f.samples * self.units:g}, by what the first "
            f"batches had. {PASS_WEIGHT}"
        )


def _samples(count: int) -> str:
    return "one sample" if count == 1 else f"{count} samples"
