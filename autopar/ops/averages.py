"""Steps that each rank takes alone, and the average of what they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.dtypes import averaged_dtype
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import Fragment, fragments, pack
from autopar.ops.gradients import MEMBER_START, cut
from autopar.ops.layouts import VARYING, unsummed
from autopar.ops.updates import Store
from autopar.ops.values import Setting, Value, Work


@dataclass(frozen=True, slots=True)
class OwnGradients(Operation):
    """What a rank would update with if all ranks had gradients like its own: n times its part of the global mean's, of
    n ranks. Where batches count alike, this is the mean over its own batch."""

    name = "own_gradients"
    reads_members = False
    takes_gradients = True

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, VARYING)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(2 * call.bytes, 1 + MEMBER_START * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        members = [cut(site, m) for m in call.members if m.elements]
        return site.call(multiplied, (members, site.world_size, site.scale))


@dataclass(frozen=True, slots=True)
class PackParameters(Operation):
    """Flattens the group's parameters behind their update, its input, divided by the number of ranks: summed over
    these they are the average. Those in 16 bits are added up in 32."""

    name = "pack_parameters"
    reads_members = False

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, averaged_dtype(at.group.dtype), unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(4 * call.bytes, 2 + MEMBER_START * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        module = PackedParameters(fragments(group, site.parameters), site.world_size, call.torch_dtype, site.device)
        return site.call_module(f"packed_{group.index}", module, ())


@dataclass(frozen=True, slots=True)
class StoreAverage(Store):
    """Writes averaged parameters into the parameters of every rank."""

    name = "store_average"


class PackedParameters(nn.Module):
    """Packs parameters as they are now, each divided by the number of ranks."""

    def __init__(self, parts: Sequence[Fragment], ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.fragments = tuple(parts)
        self.ranks = ranks
        self.dtype = dtype
        self.device = device

    def forward(self) -> torch.Tensor:
        if not self.fragments:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return pack([f.now() for f in self.fragments], self.dtype).div_(self.ranks)


def multiplied(tensors: Sequence[torch.Tensor], factor: float, scale: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients times `factor`, and times `scale` where the backward pass did not scale them; rounded once."""
    if scale is None:
        return list(torch._foreach_mul(list(tensors), factor)) if tensors else []
    return [(t * (scale * factor)).to(t.dtype) for t in tensors]
