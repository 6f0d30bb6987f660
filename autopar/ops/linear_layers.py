"""The work of a linear layer whose outputs are shared out: what each rank computes for all ranks' samples.

Rank r of n keeps outputs r, r+n, r+2n, ...: rows of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.training_graph import Layer
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.group import Group
from autopar.ops.layouts import VARYING, Shard, unsummed
from autopar.ops.messages import Message, unpacked
from autopar.ops.parts import PART_KERNELS
from autopar.ops.products import Product, formed_bytes
from autopar.ops.samples import agreed, apart, hand_back, padded, sample_count
from autopar.ops.shares import row_shares
from autopar.ops.values import Bytes, Setting, Value, Work


class LayerShard(nn.Module):
    """A rank's share of a layer. The methods are what the operations below call, in their order."""

    def __init__(self, layer: Layer, weight: torch.Tensor, rank: int, world_size: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = weight
        self.rank = rank
        self.own = [len(range(r, layer.outputs, world_size)) for r in range(world_size)]
        """Outputs of each rank."""

    def agreed(self, counts: torch.Tensor) -> list[int]:
        """Each rank's samples."""
        return agreed(counts, "a layer whose outputs are")

    def given(self, given: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What the layer is given here, flat, and as long as that of the largest batch."""
        flat = given.new_zeros(max(counts) * self.layer.width, dtype=dtype)
        flat[: given.numel()].view_as(given).copy_(given)
        return flat

    def everyone(self, gathered: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """What the layer is given by all ranks: [samples of all ranks, width]."""
        flats = gathered.view(len(counts), -1).to(self.weight.dtype)
        if set(counts) == {max(counts)}:
            return flats.view(-1, self.layer.width)
        return apart(flats, counts, self.layer.width)

    def found(self, everyone: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> Message:
        """To each rank, its samples' outputs among those kept here."""
        outputs = everyone @ self.weight.t()
        return outputs.to(dtype).view(-1), self._of_own_outputs(counts), self._of_own_samples(counts)

    def product(self, found: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None) -> torch.Tensor:
        """All outputs of this rank's samples."""
        samples, n = counts[self.rank], len(counts)
        product = self.weight.new_empty(samples, self.layer.outputs)
        for r, part in enumerate(torch.split(found, self._of_own_samples(counts))):
            product[:, r::n] = part.view(samples, self.own[r])
        return product if bias is None else product.add_(bias)

    def errors(self, error: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> Message:
        """To each rank, the errors of its outputs."""
        flat = torch.cat([error[:, r :: len(counts)].reshape(-1) for r in range(len(counts))])
        return flat.to(dtype), self._of_own_samples(counts), self._of_own_outputs(counts)

    def own_errors(self, errors: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Of the outputs kept here: [samples of all ranks, own outputs]."""
        return errors.view(sum(counts), self.own[self.rank]).to(self.weight.dtype)

    def returned(self, errors: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Every rank's part of the gradient of what its layer is given, as long as that of the largest batch."""
        return padded(errors @ self.weight, counts, dtype)

    def gradient(self, errors: torch.Tensor, everyone: torch.Tensor) -> Product:
        """Of the rows kept here."""
        return Product(errors, everyone)

    def _of_own_outputs(self, counts: Sequence[int]) -> list[int]:
        return [c * self.own[self.rank] for c in counts]

    def _of_own_samples(self, counts: Sequence[int]) -> list[int]:
        return [counts[self.rank] * own for own in self.own]


@dataclass(frozen=True, slots=True)
class _OfLayer(Operation):
    """An operation of a layer, with the numbers that its cost follows from."""

    needs_only_inputs = True
    multiplies: ClassVar[bool] = False
    """Whether it is a product of the weight kept here with all ranks' samples, or with their errors."""

    layer: Layer

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        kernels = PART_KERNELS * len(call.members)
        n = setting.world_size
        flops = 2 * n * self.layer.samples * self.layer.width * self.outputs(n) if self.multiplies else 0
        return Work(flops, self.moved_bytes(call, n), kernels=kernels)

    def moved_bytes(self, call: Call, n: int) -> int:
        return self.product_bytes(call, n) if self.multiplies else 0

    def outputs(self, n: int) -> int:
        """Of a rank, at most."""
        return -(-self.layer.outputs // n)

    def error_bytes(self, call: Call, n: int) -> int:
        return n * self.layer.samples * self.outputs(n) * DTYPE_BYTES[call.owner_group.dtype]

    def product_bytes(self, call: Call, n: int) -> int:
        """Of the weight, of what is given, and of the outputs."""
        width = DTYPE_BYTES[call.owner_group.dtype]
        weight, given = self.outputs(n) * self.layer.width, n * self.layer.samples * self.layer.width
        return (weight + given) * width + self.error_bytes(call, n)

    def of_outputs(self, sent_as: str, n: int) -> Value:
        """As many as all ranks' samples have here, of each rank."""
        one = n * self.layer.samples * self.outputs(n)
        return Value(n * one, sent_as, Shard((one,) * n), expected=True)

    def of_samples(self, dtype: str) -> Value:
        return Value(self.layer.samples * self.layer.width, dtype, VARYING, expected=True)

    def do(self, site: Site, call: Call, method: str, *arguments: Any) -> Any:
        """Calls a method of this rank's share."""
        group = call.owner_group

        def make() -> LayerShard:
            return LayerShard(self.layer, site.shards[group.names[0]], site.rank, site.world_size)

        return site.call_method(method, (site.module_of(f"layer_{group.index}", make), *arguments))

    def counts(self, site: Site, call: Call) -> Any:
        """Each rank's samples, once they are agreed upon."""
        return site.notes(call.owner_group)["counts"]

    def own_errors(self, site: Site, call: Call) -> Any:
        """Of the outputs kept here, from what all ranks have sent: the first input."""
        known = site.notes(call.owner_group)
        if "errors" not in known:
            received = site.value_of(call.inputs[0])
            known["errors"] = self.do(site, call, "own_errors", received, self.counts(site, call))
        return known["errors"]


@dataclass(frozen=True, slots=True)
class LayerCount(_OfLayer):
    """Each rank's samples."""

    name = "layer.count"

    def value(self, at: Emission) -> Value:
        return Value(at.world_size, "int64", Shard((1,) * at.world_size), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        return sample_count(site, self.layer.given)


@dataclass(frozen=True, slots=True)
class LayerGiven(_OfLayer):
    """What the layer is given here. Inputs: the counts."""

    name = "layer.given"
    sent_as: str

    def behind(self, group: Group) -> int:
        return self.layer.product_position - 1

    def value(self, at: Emission) -> Value:
        n, one = at.world_size, self.layer.samples * self.layer.width
        return Value(n * one, self.sent_as, Shard((one,) * n), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        agreed_on = self.do(site, call, "agreed", site.value_of(call.inputs[0]))
        site.notes(call.owner_group)["counts"] = agreed_on
        return self.do(site, call, "given", site.computed(self.layer.given), agreed_on, call.torch_dtype)


@dataclass(frozen=True, slots=True)
class LayerOutputs(_OfLayer):
    """To each rank, its samples' outputs among those kept here. Inputs: what all layers are given, the counts."""

    name = "layer.found"
    multiplies = True
    sent_as: str

    def value(self, at: Emission) -> Value:
        return self.of_outputs(self.sent_as, at.world_size)

    def replaces(self, group: Group) -> Sequence[str]:
        return self.layer.replaced

    def write(self, site: Site, call: Call) -> Any:
        counts = self.counts(site, call)
        everyone = self.do(site, call, "everyone", site.value_of(call.inputs[0]), counts)
        site.notes(call.owner_group)["everyone"] = everyone
        return unpacked(site, self.do(site, call, "found", everyone, counts, call.torch_dtype))


@dataclass(frozen=True, slots=True)
class LayerProduct(_OfLayer):
    """All outputs of this rank's samples, to the model's graph. Inputs: what came from all ranks."""

    name = "layer.product"

    def behind(self, group: Group) -> int:
        return self.layer.product_position

    def needed(self, group: Group) -> int:
        return self.layer.product_position - 1

    def value(self, at: Emission) -> Value:
        return Value(self.layer.samples * self.layer.outputs, at.group.dtype, VARYING, expected=True)

    def moved_bytes(self, call: Call, n: int) -> int:
        return 2 * self.error_bytes(call, n)

    def makes(self, group: Group) -> Sequence[str]:
        return (self.layer.product,)

    def write(self, site: Site, call: Call) -> Any:
        layer = self.layer
        bias = None if layer.bias is None else site.instead(layer.product, layer.bias)
        counts = self.counts(site, call)
        value = self.do(site, call, "product", site.value_of(call.inputs[0]), counts, bias)
        site.replace(layer.product, value)
        return value


@dataclass(frozen=True, slots=True)
class LayerErrors(_OfLayer):
    """To each rank, the errors of its outputs. Inputs: the counts."""

    name = "layer.errors"
    sent_as: str

    def behind(self, group: Group) -> int:
        return self.layer.turn

    def value(self, at: Emission) -> Value:
        return self.of_outputs(self.sent_as, at.world_size)

    def moved_bytes(self, call: Call, n: int) -> int:
        return 2 * self.error_bytes(call, n)

    def write(self, site: Site, call: Call) -> Any:
        error, counts = site.computed(self.layer.error), self.counts(site, call)
        return unpacked(site, self.do(site, call, "errors", error, counts, call.torch_dtype))


@dataclass(frozen=True, slots=True)
class LayerReturned(_OfLayer):
    """Every rank's part of the gradient of what its layer is given, to be summed. Inputs: all ranks' errors, the
    counts."""

    name = "layer.returned"
    multiplies = True
    sent_as: str

    def value(self, at: Emission) -> Value:
        n = at.world_size
        elements = n * self.layer.samples * self.layer.width
        return Value(elements, self.sent_as, unsummed(n), expected=True)

    def write(self, site: Site, call: Call) -> Any:
        errors = self.own_errors(site, call)
        return self.do(site, call, "returned", errors, self.counts(site, call), call.torch_dtype)


@dataclass(frozen=True, slots=True)
class LayerHandBack(_OfLayer):
    """The gradient of what this rank's layer is given, to the model's graph. Inputs: the sums of what was returned."""

    name = "layer.hand_back"

    def needed(self, group: Group) -> int:
        return self.layer.turn

    def value(self, at: Emission) -> Value:
        return self.of_samples(at.group.dtype)

    def makes(self, group: Group) -> Sequence[str]:
        return [name for name in (self.layer.given_gradient,) if name is not None]

    def write(self, site: Site, call: Call) -> Any:
        layer = self.layer
        assert layer.given_gradient is not None
        return hand_back(site, layer.given_gradient, site.value_of(call.inputs[0]), layer.given, layer.width)


@dataclass(frozen=True, slots=True)
class LayerGradient(_OfLayer):
    """Gradients of the outputs kept here. Inputs: all ranks' errors, what all layers are given, the counts."""

    name = "layer.gradient"
    multiplies = True
    in_pieces: bool = False

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, Shard(row_shares(at.group, at.world_size)))

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        """What is formed; and errors that came in a narrow dtype, as wide as they are multiplied."""
        errors, width = call.inputs[0], DTYPE_BYTES[call.dtype]
        widened = errors.elements // setting.world_size * width if errors.dtype != call.dtype else 0
        return formed_bytes(call, setting) + widened

    def write(self, site: Site, call: Call) -> Any:
        errors, everyone = self.own_errors(site, call), site.notes(call.owner_group)["everyone"]
        return [site.product(call, call.owner_group.names[0], self.do(site, call, "gradient", errors, everyone))]
