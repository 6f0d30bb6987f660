"""The work of a class-sharded head: what each rank computes for the classes that it keeps.

Rank r of n keeps classes r, r+n, r+2n, ...; class c is row c // n of what rank c % n keeps. With p_i the scores of
sample i among a rank's classes, m_i their maximum and s_i the sum of exp(p_i - m_i), the softmax over all classes needs
nothing from the other ranks but their m_i and s_i: log sum exp = M_i + log sum_r s_i exp(m_i - M_i), with M_i the
largest m_i.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.training_graph import Head
from autopar.ops.base import Bytes, Call, Operation, Setting, Site, Value, Work
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.layouts import VARYING, Shard, unsummed
from autopar.ops.parts import PART_KERNELS, as_integers, index_width
from autopar.ops.products import Product, formed_bytes
from autopar.ops.samples import agreed, apart, hand_back, padded, sample_count
from autopar.ops.shares import row_shares


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

        `counts`: each rank's samples, negative where its step has further micro-batches to come.
        """
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

    def _kept(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each sample's target among the classes kept here, and whether it is one of them."""
        kept = (target != self.head.ignored) & (target % self.world_size == self.rank)
        return torch.where(kept, target // self.world_size, 0), kept

    def _totals(self, everyone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each sample, the largest score of all, and the sum of exp(score - largest)."""
        largest, sums = everyone.view(self.world_size, self.head.numbers, -1)[:, :2].unbind(1)
        most = largest.amax(0)
        return most, (sums * (largest - most).exp()).sum(0)


@dataclass(frozen=True, slots=True)
class _OfHead(Operation):
    """An operation of a head, with the numbers that its cost follows from."""

    head: Head
    method: ClassVar[str]
    """Of `HeadShard`: what does it."""

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        kernels = PART_KERNELS * len(call.members)
        return Work(self.flops(), self.moved_bytes(call.owner_group, setting.world_size), kernels=kernels)

    def flops(self) -> int:
        return 0

    def moved_bytes(self, group: Group, n: int) -> int:
        return 0

    def write(self, site: Site, call: Call) -> Any:
        return self.do(site, call)

    def do(self, site: Site, call: Call, *more: Any) -> Any:
        """Calls the method on the inputs, and on what else it takes."""
        inputs = [site.value_of(i) for i in call.inputs]
        return self._call(site, call, *inputs, *more)

    def _call(self, site: Site, call: Call, *arguments: Any) -> Any:
        head = self.head

        def make() -> HeadShard:
            bias = None if head.bias is None else site.shards[head.bias]
            return HeadShard(head, site.shards[head.weight], bias, site.rank, site.world_size)

        shard = site.module_of(f"head_{call.owner_group.index}", make)
        return site.call_method(self.method, (shard, *arguments))

    def _product_flops(self) -> int:
        return 2 * self.head.samples * self.head.classes * self.head.width

    def _weight_and_given_bytes(self, group: Group, n: int) -> int:
        width = DTYPE_BYTES[group.dtype]
        return group.elements // n * width + n * self.head.samples * self.head.width * width

    def _score_bytes(self) -> int:
        """n times the samples, a share of the classes."""
        return self.head.samples * self.head.classes * DTYPE_BYTES[self.head.dtype]


@dataclass(frozen=True, slots=True)
class HeadCount(_OfHead):
    """Each rank's samples."""

    name = "head.count"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        return Value(context.world_size, "int64", Shard((1,) * context.world_size), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        return sample_count(site, self.head.samples)


@dataclass(frozen=True, slots=True)
class HeadSamples(_OfHead):
    """What the layer is given here, with its targets. Inputs: the counts."""

    name = "head.samples"
    method = "samples"
    sent_as: str

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        n, one = context.world_size, self.head.samples * (self.head.width + index_width(self.sent_as))
        one += one % 2
        return Value(n * one, self.sent_as, Shard((one,) * n), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        hidden, target = site.computed(self.head.hidden), site.computed(self.head.target)
        return self._call(site, call, hidden, target, site.value_of(call.inputs[0]), call.torch_dtype)


@dataclass(frozen=True, slots=True)
class HeadScores(_OfHead):
    """All ranks' samples against the classes kept here. Inputs: what all layers are given, the counts."""

    name = "head.scores"
    method = "scores"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        return Value(self.head.samples * self.head.classes, self.head.dtype, VARYING, expected=True)

    def flops(self) -> int:
        return self._product_flops()

    def moved_bytes(self, group: Group, n: int) -> int:
        return self._weight_and_given_bytes(group, n) + 3 * self._score_bytes()

    def replaces(self, group: Group) -> Sequence[str]:
        return self.head.replaced


@dataclass(frozen=True, slots=True)
class HeadSums(_OfHead):
    """What the other ranks need of the scores. Inputs: the scores."""

    name = "head.sums"
    method = "sums"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        n, one = context.world_size, self.head.numbers * context.world_size * self.head.samples
        return Value(n * one, self.head.dtype, Shard((one,) * n), expected=True)


@dataclass(frozen=True, slots=True)
class HeadLoss(_OfHead):
    """This rank's loss. Inputs: the scores, all ranks' sums."""

    name = "head.loss"
    method = "loss"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        return Value(1, self.head.dtype, VARYING, expected=True)

    def write(self, site: Site, call: Call) -> Any:
        value = self.do(site, call)
        site.replace(self.head.loss, value)
        return value


@dataclass(frozen=True, slots=True)
class HeadLogSum(_OfHead):
    """Of this rank's samples, the sums of their log-probabilities. Inputs: the scores, all ranks' sums."""

    name = "head.log_sum"
    method = "log_sum"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        return Value(self.head.samples, self.head.dtype, VARYING, expected=True)

    def write(self, site: Site, call: Call) -> Any:
        assert self.head.log_sum is not None
        value = self.do(site, call)
        site.replace(self.head.log_sum, value)
        return value


@dataclass(frozen=True, slots=True)
class HeadSeed(_OfHead):
    """The gradient of this rank's loss, and those of the sums. Inputs: the scores."""

    name = "head.seed"
    method = "seed"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        n, one = context.world_size, 1 if self.head.log_sum is None else 1 + self.head.samples
        return Value(n * one, self.head.dtype, Shard((one,) * n), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        of_sums = self.head.log_sum_gradient
        return self.do(site, call, site.computed(self.head.seed), None if of_sums is None else site.computed(of_sums))


@dataclass(frozen=True, slots=True)
class HeadErrors(_OfHead):
    """Gradients of the scores, in their place. Inputs: the scores, all ranks' sums, all ranks' seeds."""

    name = "head.errors"
    method = "errors"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        assert group is not None
        return Value(self.head.samples * self.head.classes, group.dtype, VARYING, expected=True)

    def moved_bytes(self, group: Group, n: int) -> int:
        return 2 * self._score_bytes()

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return None


@dataclass(frozen=True, slots=True)
class HeadReturned(_OfHead):
    """Every rank's part of the gradient of what its layer is given, to be summed. Inputs: the errors."""

    name = "head.returned"
    method = "returned"
    sent_as: str

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        n = context.world_size
        return Value(n * self.head.samples * self.head.width, self.sent_as, unsummed(n), expected=True)

    def flops(self) -> int:
        return self._product_flops()

    def moved_bytes(self, group: Group, n: int) -> int:
        return self._weight_and_given_bytes(group, n) + self._score_bytes()

    def write(self, site: Site, call: Call) -> Any:
        return self.do(site, call, call.torch_dtype)


@dataclass(frozen=True, slots=True)
class HeadHandBack(_OfHead):
    """The gradient of what this rank's layer is given, to the model's graph. Inputs: the sums of what was returned."""

    name = "head.hand_back"

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        assert group is not None
        return Value(self.head.samples * self.head.width, group.dtype, VARYING, expected=True)

    def makes(self, group: Group) -> Sequence[str]:
        return [name for name in (self.head.hidden_gradient,) if name is not None]

    def write(self, site: Site, call: Call) -> Any:
        head = self.head
        assert head.hidden_gradient is not None
        return hand_back(site, head.hidden_gradient, site.value_of(call.inputs[0]), head.samples, head.width)


@dataclass(frozen=True, slots=True)
class HeadGradient(_OfHead):
    """Gradients of the classes kept here. Inputs: the errors."""

    name = "head.gradient"
    method = "gradient"
    in_pieces: bool = False

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        assert group is not None
        return Value(group.elements, group.dtype, Shard(row_shares(group, context.world_size)))

    def flops(self) -> int:
        return self._product_flops()

    def moved_bytes(self, group: Group, n: int) -> int:
        return self._weight_and_given_bytes(group, n) + self._score_bytes()

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return formed_bytes(call, setting)

    def write(self, site: Site, call: Call) -> Any:
        group, weight = call.owner_group, self.head.weight
        found = self.do(site, call, group.names)
        parts = {name: site.call(operator.getitem, (found, i)) for i, name in enumerate(group.names)}
        if any(m.parameter.table is not None for m in group.members):  # rows are added to it
            return [site.call_method("whole", (p,)) if name == weight else p for name, p in parts.items()]
        return [site.product(call, name, p) if name == weight else site.gradient(name, p) for name, p in parts.items()]
