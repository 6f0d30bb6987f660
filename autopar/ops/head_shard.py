"""The work of a class-sharded head: what each rank computes for the classes that it keeps.

Rank r of n keeps classes r, r+n, r+2n, ...; class c is row c // n of what rank c % n keeps. With p_i the scores of
sample i among a rank's classes, m_i their maximum and s_i the sum of exp(p_i - m_i), the softmax over all classes needs
nothing from the other ranks but their m_i and s_i: log sum exp = M_i + log sum_r s_i exp(m_i - M_i), with M_i the
largest m_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.ir.training_graph import Head
from autopar.ops.parts import as_integers, index_width
from autopar.ops.products import Product
from autopar.ops.samples import agreed, apart, padded


@dataclass
class Scored:
    """What the later operations of a step need of a rank's scores."""

    given: torch.Tensor
    """[samples of all ranks, width]."""
    target: torch.Tensor
    """int64, of all ranks' samples."""
    exps: torch.Tensor
    """[samples of all ranks, own classes]: exp(score - the largest of them); overwritten by the errors."""
    sums: torch.Tensor
    """[`Head.numbers`, samples of all ranks]: the largest score, the sum of `exps`, the target's score where this rank
    keeps it, and the sum of the scores where label smoothing reads it."""
    counts: list[int]
    """Samples of each rank."""


@dataclass
class Errors:
    """Gradients of a rank's scores."""

    values: torch.Tensor
    given: torch.Tensor
    counts: list[int]


class HeadShard(nn.Module):
    """A rank's share of a head. The methods are what the operations below call, in their order."""

    def __init__(self, head: Head, weight: torch.Tensor, bias: torch.Tensor | None, rank: int, world_size: int) -> None:
        super().__init__()
        self.head = head
        self.weight = weight
        self.bias = bias
        self.rank = rank
        self.world_size = world_size

    def samples(
        self, hidden: torch.Tensor, target: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """What the layer is given here, with its targets, as one flat value as long as that of the largest batch.

        `counts`: each rank's samples, negative where its step has further micro-batches to come. Raises `IndexError`,
        as PyTorch does, where a target is no class.
        """
        self._check(target)
        extra = index_width(str(dtype).removeprefix("torch."))
        longest, count = max(agreed(counts, "a head whose classes are")), len(hidden)
        size = longest * (hidden.shape[1] + extra)
        flat = hidden.new_zeros(size + size % 2, dtype=dtype)  # an even number: the next rank's integers are aligned
        as_integers(flat[: longest * extra])[:count].copy_(target)
        flat[longest * extra : size].view(longest, -1)[:count].copy_(hidden)
        return flat

    def scores(self, gathered: torch.Tensor, counts: torch.Tensor) -> Scored:
        """All ranks' samples against the classes kept here."""
        by_rank = counts.abs().tolist()
        longest, width = max(by_rank), self.weight.shape[1]
        extra = index_width(str(gathered.dtype).removeprefix("torch.")) * longest
        flats = gathered.view(self.world_size, -1)
        target = torch.cat([as_integers(f[:extra])[:c] for f, c in zip(flats, by_rank, strict=True)]).long()
        given = apart(flats, by_rank, width, first=extra).to(self.weight.dtype)
        product = given @ self.weight.t() if self.bias is None else torch.addmm(self.bias, given, self.weight.t())
        scores = product.to(getattr(torch, self.head.dtype))
        sums = scores.new_zeros(self.head.numbers, len(given))
        if scores.shape[1] == 0:  # more ranks than classes
            sums[0] = -torch.inf
        else:
            places, kept = self._kept(target)
            torch.amax(scores, 1, out=sums[0])
            sums[2] = torch.where(kept, scores.gather(1, places.unsqueeze(1)).squeeze(1), 0)
            if self.head.log_sum is not None:
                torch.sum(scores, 1, out=sums[3])
            scores.sub_(sums[0].unsqueeze(1)).exp_()
            torch.sum(scores, 1, out=sums[1])
        return Scored(given, target, scores, sums, by_rank)

    def sums(self, scored: Scored) -> torch.Tensor:
        """What the other ranks need of the scores."""
        return scored.sums.view(-1)

    def loss(self, scored: Scored, everyone: torch.Tensor) -> torch.Tensor:
        """This rank's loss, as the cross-entropy over all classes."""
        largest, total = self._totals(everyone)
        score = everyone.view(self.world_size, self.head.numbers, -1)[:, 2].sum(0)
        own = self._own(scored)
        counts = scored.target[own] != self.head.ignored
        lost = torch.where(counts, (largest + total.log() - score)[own], 0).sum()
        return lost / counts.sum() if self.head.mean else lost

    def log_sum(self, scored: Scored, everyone: torch.Tensor) -> torch.Tensor:
        """Of this rank's samples, the sums of their log-probabilities over all classes."""
        largest, total = self._totals(everyone)
        scores = everyone.view(self.world_size, self.head.numbers, -1)[:, 3].sum(0)
        return (scores - self.head.classes * (largest + total.log()))[self._own(scored)]

    def seed(self, scored: Scored, seed: torch.Tensor, of_samples: torch.Tensor | None) -> torch.Tensor:
        """The gradient of this rank's loss, and those of `log_sum`, as long as of the largest batch."""
        if of_samples is None:
            return seed.reshape(1)
        flat = of_samples.new_zeros(1 + max(scored.counts))
        flat[0] = seed
        flat[1 : 1 + len(of_samples)] = of_samples
        return flat

    def errors(self, scored: Scored, everyone: torch.Tensor, seeds: torch.Tensor) -> Errors:
        """Gradients of the scores: softmax less one at the target, times each rank's gradient of its loss; and, of what
        label smoothing adds, one less as many times the softmax as there are classes."""
        largest, total = self._totals(everyone)
        counts = (scored.target != self.head.ignored).to(seeds.dtype)
        by_rank = seeds.view(self.world_size, -1)
        shares = []
        for seed, of_rank in zip(by_rank[:, 0], torch.split(counts, scored.counts), strict=True):
            shares.append(of_rank * (seed / of_rank.sum().clamp(min=1) if self.head.mean else seed))
        share = torch.cat(shares)
        values, factor = scored.exps, share
        if self.head.log_sum is not None:
            smooth = torch.cat([s[1 : 1 + c] for s, c in zip(by_rank, scored.counts, strict=True)])
            factor = share - self.head.classes * smooth
        values.mul_((factor * (scored.sums[0] - largest).exp() / total).unsqueeze(1))
        if self.head.log_sum is not None:
            values.add_(smooth.unsqueeze(1))
        if values.shape[1]:
            places, kept = self._kept(scored.target)
            values.scatter_add_(1, places.unsqueeze(1), torch.where(kept, -share, 0).unsqueeze(1))
        return Errors(values.to(self.weight.dtype), scored.given, scored.counts)

    def returned(self, errors: Errors, dtype: torch.dtype) -> torch.Tensor:
        """Every rank's part of the gradient of what its layer is given, as long as that of the largest batch."""
        return padded(errors.values @ self.weight, errors.counts, dtype)

    def gradient(self, errors: Errors, names: Sequence[str]) -> list[Product | torch.Tensor]:
        """Gradients of the rows kept here, in the order of the group's members."""
        product = Product(errors.values, errors.given)
        return [product if name == self.head.weight else errors.values.sum(0) for name in names]

    def _own(self, scored: Scored) -> slice:
        """This rank's samples among those of all."""
        first = sum(scored.counts[: self.rank])
        return slice(first, first + scored.counts[self.rank])

    def _check(self, target: torch.Tensor) -> None:
        """Here, where the targets come from: the rank that would keep such a class may have none at all."""
        wrong = (target != self.head.ignored) & ((target < 0) | (target >= self.head.classes))
        if target.is_cuda:  # without waiting for the device
            torch._assert_async(~wrong.any(), f"a target is not one of {self.head.classes} classes")
        elif wrong.any():
            raise IndexError(f"target {int(target[wrong][0])} is not one of {self.head.classes} classes")

    def _kept(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each sample's target among the classes kept here, and whether it is one of them."""
        kept = (target != self.head.ignored) & (target % self.world_size == self.rank)
        return torch.where(kept, target // self.world_size, 0), kept

    def _totals(self, everyone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each sample, the largest score of all, and the sum of exp(score - largest)."""
        largest, sums = everyone.view(self.world_size, self.head.numbers, -1)[:, :2].unbind(1)
        most = largest.amax(0)
        return most, (sums * (largest - most).exp()).sum(0)
