"""Replicas that each rank has updated alone: their parameters, and moments of the optimizer, averaged together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from autopar.ir.dtypes import averaged_dtype
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import Fragment, fragments
from autopar.ops.gradients import MEMBER_START
from autopar.ops.layouts import unsummed
from autopar.ops.values import Setting, Value, Work


class OptimizerPart(Protocol):
    """The optimizer over the fragments of a sync group."""

    fragments: tuple[Fragment, ...]

    def state(self) -> list[tuple[Fragment, dict[str, Any]]]:
        """What it keeps of each fragment."""


@dataclass(frozen=True, slots=True)
class PackReplicas(Operation):
    """Flattens the group's parameters behind their update, its input, and behind them moments of the optimizer, divided
    by the number of ranks: summed over these they are averages."""

    name = "pack_replicas"
    reads_members = False
    moments: tuple[str, ...]
    """What the optimizer calls them."""

    def value(self, at: Emission) -> Value:
        elements, dtype = at.group.elements * (1 + len(self.moments)), averaged_dtype(at.group.dtype)
        return Value(elements, dtype, unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(4 * call.bytes, 2 + MEMBER_START * len(call.members) * (1 + len(self.moments)))

    def write(self, site: Site, call: Call) -> Any:
        replicas = _replicas(site, call, self.moments)
        module = PackedReplicas(replicas, site.world_size, call.elements, call.torch_dtype, site.device)
        return site.call_module(f"packed_{call.owner_group.index}", module, ())


@dataclass(frozen=True, slots=True)
class StoreReplicas(Operation):
    """Writes averages into the parameters and the optimizer's moments of every rank."""

    name = "store_replicas"
    reads_members = False
    changes_parameters = True
    in_place = True
    moments: tuple[str, ...]

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(2 * call.bytes, 1 + MEMBER_START * len(call.members) * (1 + len(self.moments)))

    def write(self, site: Site, call: Call) -> Any:
        module = StoredReplicas(_replicas(site, call, self.moments))
        return site.call_module(f"average_{call.owner_group.index}", module, (site.value_of(call.inputs[0]),))


class Replicas:
    """This rank's replica of a group's parameters, and of the optimizer's moments of them."""

    def __init__(self, parts: Sequence[Fragment], part: OptimizerPart, moments: tuple[str, ...]) -> None:
        self.fragments = tuple(parts)
        self.part = part
        self.moments = moments

    def pairs(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of a flat value, and the tensors that they are of. What the optimizer has not got, as it has never
        updated a parameter, is left out."""
        elements = len(flat) // (1 + len(self.moments))
        rows = flat.view(1 + len(self.moments), elements)
        views, tensors = [f.of(rows[0]) for f in self.fragments], [f.now().detach() for f in self.fragments]
        for row, key in zip(rows[1:], self.moments, strict=True):
            for fragment, state in self.part.state() if self.fragments else ():
                if key in state:
                    views.append(fragment.of(row))
                    tensors.append(state[key])
        return views, tensors


class PackedReplicas(nn.Module):
    """Packs a replica as it is now, divided by the number of ranks."""

    def __init__(self, replicas: Replicas, ranks: int, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.replicas = replicas
        self.ranks = ranks
        self.elements = elements
        self.dtype = dtype
        self.device = device

    def forward(self) -> torch.Tensor:
        flat = torch.zeros(self.elements, dtype=self.dtype, device=self.device)
        views, tensors = self.replicas.pairs(flat)
        if views:
            torch._foreach_copy_(views, tensors)
        return flat.div_(self.ranks)


class StoredReplicas(nn.Module):
    """Overwrites a replica."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self.replicas = replicas

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        views, tensors = self.replicas.pairs(flat)
        if views:
            torch._foreach_copy_(tensors, views)
        return flat


def _replicas(site: Site, call: Call, moments: tuple[str, ...]) -> Replicas:
    parts = fragments(call.owner_group, site.parameters)
    return Replicas(parts, site.part(call.owner_group.index, parts), moments)
