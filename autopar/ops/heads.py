"""The operations of a class-sharded head, in the order of a step. `autopar.ops.head_shard` does the work."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.training_graph import Head
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.group import Group
from autopar.ops.head_shard import HeadShard
from autopar.ops.layouts import VARYING, Shard, unsummed
from autopar.ops.parts import PART_KERNELS, index_width
from autopar.ops.products import formed_bytes
from autopar.ops.samples import hand_back, sample_count
from autopar.ops.shares import row_shares
from autopar.ops.values import Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class _OfHead(Operation):
    """An operation of a head, with the numbers that its cost follows from."""

    needs_only_inputs = True

    head: Head
    method: ClassVar[str]
    """The method of `HeadShard` that runs it."""
    multiplies: ClassVar[bool] = False
    """Whether it is a product of the classes kept here with all ranks' samples, or with their errors."""

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        kernels = PART_KERNELS * len(call.members)
        flops = 2 * self.head.samples * self.head.classes * self.head.width if self.multiplies else 0
        return Work(flops, self.moved_bytes(call.owner_group, setting.world_size), kernels=kernels)

    def moved_bytes(self, group: Group, n: int) -> int:
        return 0

    def write(self, site: Site, call: Call) -> Any:
        return self.do(site, call)

    def do(self, site: Site, call: Call, *more: Any) -> Any:
        """Calls the method on the inputs, and on what else it takes."""
        inputs = [site.value_of(i) for i in call.inputs]
        return self._call(site, call, *inputs, *more)

    def hand_over(self, site: Site, call: Call, node: str) -> Any:
        """Calls the method on the inputs, and puts what it returns in the place of a node of the model's graph."""
        value = self.do(site, call)
        site.replace(node, value)
        return value

    def _call(self, site: Site, call: Call, *arguments: Any) -> Any:
        head = self.head

        def make() -> HeadShard:
            bias = None if head.bias is None else site.shards[head.bias]
            return HeadShard(head, site.shards[head.weight], bias, site.rank, site.world_size)

        shard = site.module_of(f"head_{call.owner_group.index}", make)
        return site.call_method(self.method, (shard, *arguments))

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

    def value(self, at: Emission) -> Value:
        return Value(at.world_size, "int64", Shard((1,) * at.world_size), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        return sample_count(site, self.head.hidden)


@dataclass(frozen=True, slots=True)
class HeadSamples(_OfHead):
    """What the layer is given here, with its targets. Inputs: the counts."""

    name = "head.samples"
    method = "samples"
    sent_as: str

    def behind(self, group: Group) -> int:
        return self.head.begin

    def value(self, at: Emission) -> Value:
        n, one = at.world_size, self.head.samples * (self.head.width + index_width(self.sent_as))
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
    multiplies = True

    def value(self, at: Emission) -> Value:
        return Value(self.head.samples * self.head.classes, self.head.dtype, VARYING, expected=True)

    def moved_bytes(self, group: Group, n: int) -> int:
        return self._weight_and_given_bytes(group, n) + 3 * self._score_bytes()

    def replaces(self, group: Group) -> Sequence[str]:
        return self.head.replaced


@dataclass(frozen=True, slots=True)
class HeadSums(_OfHead):
    """What the other ranks need of the scores. Inputs: the scores."""

    name = "head.sums"
    method = "sums"

    def value(self, at: Emission) -> Value:
        n, one = at.world_size, self.head.numbers * at.world_size * self.head.samples
        return Value(n * one, self.head.dtype, Shard((one,) * n), expected=True)


@dataclass(frozen=True, slots=True)
class HeadLoss(_OfHead):
    """This rank's loss. Inputs: the scores, all ranks' sums."""

    name = "head.loss"
    method = "loss"

    def needed(self, group: Group) -> int:
        return self.head.begin

    def value(self, at: Emission) -> Value:
        return Value(1, self.head.dtype, VARYING, expected=True)

    def write(self, site: Site, call: Call) -> Any:
        return self.hand_over(site, call, self.head.loss)


@dataclass(frozen=True, slots=True)
class HeadLogSum(_OfHead):
    """Of this rank's samples, the sums of their log-probabilities. Inputs: the scores, all ranks' sums."""

    name = "head.log_sum"
    method = "log_sum"

    def needed(self, group: Group) -> int:
        return self.head.begin

    def value(self, at: Emission) -> Value:
        return Value(self.head.samples, self.head.dtype, VARYING, expected=True)

    def write(self, site: Site, call: Call) -> Any:
        assert self.head.log_sum is not None
        return self.hand_over(site, call, self.head.log_sum)


@dataclass(frozen=True, slots=True)
class HeadSeed(_OfHead):
    """The gradient of this rank's loss, and those of the sums. Inputs: the scores."""

    name = "head.seed"
    method = "seed"

    def behind(self, group: Group) -> int:
        return self.head.turn

    def value(self, at: Emission) -> Value:
        n, one = at.world_size, 1 if self.head.log_sum is None else 1 + self.head.samples
        return Value(n * one, self.head.dtype, Shard((one,) * n), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        of_sums = self.head.log_sum_gradient
        return self.do(site, call, site.computed(self.head.seed), None if of_sums is None else site.computed(of_sums))


@dataclass(frozen=True, slots=True)
class HeadErrors(_OfHead):
    """Gradients of the scores, in their place. Inputs: the scores, all ranks' sums, all ranks' seeds."""

    name = "head.errors"
    method = "errors"
    in_place = True

    def value(self, at: Emission) -> Value:
        return Value(self.head.samples * self.head.classes, at.group.dtype, VARYING, expected=True)

    def moved_bytes(self, group: Group, n: int) -> int:
        return 2 * self._score_bytes()


@dataclass(frozen=True, slots=True)
class HeadReturned(_OfHead):
    """Every rank's part of the gradient of what its layer is given, to be summed. Inputs: the errors."""

    name = "head.returned"
    method = "returned"
    multiplies = True
    sent_as: str

    def value(self, at: Emission) -> Value:
        n = at.world_size
        return Value(n * self.head.samples * self.head.width, self.sent_as, unsummed(n), expected=True)

    def moved_bytes(self, group: Group, n: int) -> int:
        return self._weight_and_given_bytes(group, n) + self._score_bytes()

    def write(self, site: Site, call: Call) -> Any:
        return self.do(site, call, call.torch_dtype)


@dataclass(frozen=True, slots=True)
class HeadHandBack(_OfHead):
    """The gradient of what this rank's layer is given, to the model's graph. Inputs: the sums of what was returned."""

    name = "head.hand_back"

    def needed(self, group: Group) -> int:
        return self.head.turn

    def value(self, at: Emission) -> Value:
        return Value(self.head.samples * self.head.width, at.group.dtype, VARYING, expected=True)

    def makes(self, group: Group) -> Sequence[str]:
        return [name for name in (self.head.hidden_gradient,) if name is not None]

    def write(self, site: Site, call: Call) -> Any:
        head = self.head
        assert head.hidden_gradient is not None
        return hand_back(site, head.hidden_gradient, site.value_of(call.inputs[0]), head.hidden, head.width)


@dataclass(frozen=True, slots=True)
class HeadGradient(_OfHead):
    """Gradients of the classes kept here. Inputs: the errors."""

    name = "head.gradient"
    method = "gradient"
    multiplies = True
    in_pieces: bool = False

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, Shard(row_shares(at.group, at.world_size)))

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
