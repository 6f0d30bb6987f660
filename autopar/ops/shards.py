"""This rank's rows of a group's parameters: gathered with those of other ranks, and given their gradients."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.fragments import pack, rows_of_rank
from autopar.ops.group import Group
from autopar.ops.layouts import REPLICATE, Shard, unsummed
from autopar.ops.parts import PART_KERNELS
from autopar.ops.samples import uneven_micro_batches
from autopar.ops.shares import row_shares
from autopar.ops.values import Setting, Value, Work


class ParameterShards(nn.Module):
    """Rank r has rows r, r+n, r+2n, ... of each. Flat values have the rows of rank 0 of all members, then those of
    rank 1, and so on."""

    def __init__(
        self,
        shards: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        strides: Sequence[tuple[int, ...]],
        rank: int,
        world_size: int,
    ) -> None:
        """`shapes`, `strides`: of the whole parameters, as the graph was traced with them."""
        super().__init__()
        self._shards, self._layouts = list(shards), list(zip(shapes, strides, strict=True))
        self._rank, self._world_size = rank, world_size

    def own(self, members: Sequence[int], is_last: bool | None) -> torch.Tensor:
        """What this rank has of some members, to be gathered; behind it, where that is to be agreed upon, whether the
        batch is the last one of its step."""
        shards = [self._shards[i] for i in members]
        if is_last is not None:
            shards.append(shards[0].new_full((1,), float(is_last)))
        return shards[0].view(-1) if len(shards) == 1 else pack(shards, shards[0].dtype)

    def whole(self, flat: torch.Tensor, members: Sequence[int], agrees: bool) -> list[torch.Tensor]:
        """These members, from what all ranks have. Raises `SignatureError` where ranks are to agree, and do not."""
        found = [flat.new_empty_strided(*self._layouts[i]) for i in members]
        last = flat.new_empty(self._world_size)
        views = self._rows([*found, last] if agrees else found)
        torch._foreach_copy_(views, _split(flat, views))
        if agrees and bool((last != last[0]).any()):  # complex numbers have no order
            raise uneven_micro_batches("a parameter whose rows are")
        return found

    def pack(self, gradients: Sequence[torch.Tensor], dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
        """The whole gradients of all members, to be summed to the owners of their rows."""
        return pack(self._rows(gradients), dtype, scale)

    def gradient(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of this rank's rows of each member."""
        return _split(flat, self._shards)

    def _rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of each rank of each tensor, as flat values have them."""
        n = self._world_size
        return [t[rows_of_rank(rank, n)] for rank in range(n) for t in tensors]


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of a flat value, as tensors of these shapes."""
    parts = torch.split(flat, [t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


@dataclass(frozen=True, slots=True)
class _OfPass(Operation):
    """An operation of parameters that are gathered for a pass."""

    needs_only_inputs = True

    backward: bool
    """Whether for the backward pass; ranks agree before the forward pass whether the batch is the last of its step."""

    def some(self, group: Group) -> Group:
        """The members that the pass reads."""
        places = self.places(group)
        if len(places) == len(group.members):
            return group
        return Group(group.index, group.spec, tuple(group.members[i] for i in places))

    def places(self, group: Group) -> list[int]:
        return [i for i, m in enumerate(group.members) if not self.backward or m.parameter.first_backward >= 0]

    def uses(self, group: Group) -> list[int]:
        """Of each of these members, the position at which the pass first reads it."""
        members = [group.members[i].parameter for i in self.places(group)]
        return [p.first_backward if self.backward else p.first_use for p in members]

    @property
    def flags(self) -> int:
        """Elements that each rank sends besides."""
        return int(not self.backward)


@dataclass(frozen=True, slots=True)
class OwnShards(_OfPass):
    """This rank's rows, to be gathered."""

    name = "shards.own"
    makes_parameters = True

    def value(self, at: Emission) -> Value:
        some, n = self.some(at.group), at.world_size
        sizes = row_shares(some, n, self.flags)
        return Value(some.elements + n * self.flags, at.group.dtype, Shard(sizes))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        own = self.some(call.owner_group).elements // setting.world_size
        moved = 2 * own * DTYPE_BYTES[call.dtype]
        return Work(moved_bytes=moved, kernels=PART_KERNELS * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        is_last = None if self.backward else site.is_last
        return _do(site, call, "own", self.places(call.owner_group), is_last)


@dataclass(frozen=True, slots=True)
class WholeParameters(_OfPass):
    """Parameters in the places of those that the pass reads. Inputs: the rows of all ranks."""

    name = "shards.whole"

    def value(self, at: Emission) -> Value:
        return Value(self.some(at.group).elements, at.group.dtype, REPLICATE)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return Work(moved_bytes=2 * call.bytes, kernels=PART_KERNELS * len(call.members))

    def gathers(self, group: Group) -> Sequence[str]:
        return group.names

    def needed(self, group: Group) -> int:
        return min(self.uses(group)) - 1

    def write(self, site: Site, call: Call) -> Any:
        group, places = call.owner_group, self.places(call.owner_group)
        found = _do(site, call, "whole", site.value_of(call.inputs[0]), places, not self.backward)
        for i, member in enumerate(places):
            spec = group.members[member].parameter.spec
            value = site.call(operator.getitem, (found, i))
            site.replace_parameter((spec.name, *spec.ties), value, views=self.backward)
        return None


@dataclass(frozen=True, slots=True)
class PackRows(Operation):
    """The whole gradients of all members, row by row of their owners, to be summed to these."""

    name = "shards.pack"
    takes_gradients = True
    sent_as: str

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, self.sent_as, unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        moved = call.elements * (DTYPE_BYTES[call.owner_group.dtype] + DTYPE_BYTES[call.dtype])
        return Work(moved_bytes=moved, kernels=PART_KERNELS * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        gradients = [site.local_gradient(name) for name in call.owner_group.names]
        return _do(site, call, "pack", gradients, call.torch_dtype, site.scale)


@dataclass(frozen=True, slots=True)
class ShardGradient(Operation):
    """The gradients of this rank's rows. Inputs: their sums, flat."""

    name = "shards.gradient"
    in_place = True

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, Shard(row_shares(at.group, at.world_size)))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return Work(kernels=PART_KERNELS * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        found = _do(site, call, "gradient", site.value_of(call.inputs[0]))
        names = call.owner_group.names
        return [site.gradient(name, site.call(operator.getitem, (found, i))) for i, name in enumerate(names)]


def _do(site: Site, call: Call, method: str, *arguments: Any) -> Any:
    """Calls a method of this rank's rows of the group's parameters."""
    group = call.owner_group

    def make() -> ParameterShards:
        shapes = [m.parameter.spec.shape for m in group.members]
        strides = [site.strides(name) for name in group.names]
        return ParameterShards([site.shards[name] for name in group.names], shapes, strides, site.rank, site.world_size)

    return site.call_method(method, (site.module_of(f"shards_{group.index}", make), *arguments))
