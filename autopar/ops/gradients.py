"""Gradients on their way from the backward pass to who synchronizes them, and to `parameter.grad`; and their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from autopar.backends.collectives import all_reduce, wait
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import pack
from autopar.ops.group import Member
from autopar.ops.layouts import unsummed
from autopar.ops.values import Bytes, Setting, Value, Work
from autopar.ops.waits import StepSum

MEMBER_START = 0.2
"""Time of each tensor in a for-each copy, in units of a kernel's start. [Empirical: 1 to 2 us on a CPU]"""


@dataclass(frozen=True, slots=True)
class Pack(Operation):
    """Flattens, concatenates and casts the group's gradients, as soon as the last of them is complete: of this rank's
    batch, scaled so that the sum over ranks is the mean over the global batch."""

    name = "pack"
    reads_members = False
    takes_gradients = True
    queue = "gradients"
    dtype: str

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, self.dtype, unsummed(at.world_size))

    def passes_through(self, call: Call) -> bool:
        """Whether the value is the memory of the group's only gradient, not a copy."""
        return len(call.members) == 1 and call.dtype == call.owner_group.dtype

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        """One pass over the gradients; no work on one rank, nor for one gradient that is sent as it is."""
        group = call.owner_group
        if setting.world_size == 1 or self.passes_through(call):
            return Work()
        moved = call.elements * (DTYPE_BYTES[group.dtype] + DTYPE_BYTES[call.dtype])
        return copied(moved, 1 + MEMBER_START * len(group.members))

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return None if setting.world_size == 1 else call.bytes

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        held = [m for m in group.members if m.elements]
        members = [cut(site, m) for m in held]
        if site.world_size == 1 or not members:
            return members if site.world_size == 1 else site.empty(call)
        if len(members) == 1 and group.dtype == call.dtype and site.scale is None:
            # One element wide, a slice stays strided as it is flattened, and gloo would sum it wrongly.
            own = torch.Tensor.contiguous if site.owns(held[0].slice.name) else torch.clone
            return site.call(own, (site.call(torch.Tensor.reshape, (members[0], (-1,))),))
        return site.call(pack, (members, call.torch_dtype, site.scale))


@dataclass(frozen=True, slots=True)
class Deliver(Operation):
    """Hands the synchronized gradient over to `parameter.grad`, in a program without an optimizer. Inputs: the
    gradients; where they are clipped, the coefficient."""

    name = "deliver"
    reads_members = False
    changes_parameters = True
    takes_clip = True
    in_place = True

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, at.inputs[0].layout)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        cast = 2 * call.bytes if call.inputs[0].dtype != call.owner_group.dtype else 0
        starts = MEMBER_START * len(call.members)
        return Work(moved_bytes=cast, kernels=starts + (1 if cast else 0))

    def write(self, site: Site, call: Call) -> Any:
        return site.deliver(call, site.value_of(call.inputs[0]))


@dataclass(frozen=True, slots=True)
class Clip(Operation):
    """The coefficient that gradients are multiplied with before the update, to clip them and to undo the scale of the
    loss: from the global norm over all of them; one small sum over ranks where some are sharded."""

    name = "clip"
    reads_members = False
    in_place = True

    def value(self, at: Emission) -> Value:
        return Value(1, "float64")

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        """One pass over all gradients that a rank holds, for their norm."""
        held = sum(i.held_elements(rank) * DTYPE_BYTES[i.dtype] for i in call.inputs)
        return copied(held, 1 + MEMBER_START * len(call.inputs))

    def sends(self, call: Call) -> Call | None:
        """The sum, over ranks, of the squares of gradients of which ranks hold parts."""
        if not any(i.is_sharded for i in call.inputs):
            return None
        return Call(call.index, StepSum(of="norm"), (), None, Value(1, "float64"))

    def write(self, site: Site, call: Call) -> Any:
        held = site.clipped(call)
        shared = any(i.is_sharded for i in call.inputs)
        once = [once for once, _ in held]
        channel = site.channel() if shared else None
        module = Norm(site.max_norm, once, channel, site.device, site.loss_scale)
        return site.call_module("clip", module, ([value for _, value in held],))


class Norm(nn.Module):
    """The factor that brings the global gradient norm down to `max_norm`, as `clip_grad_norm_` computes it, and takes
    the scale of the loss back; NaN where gradients that are scaled are not finite."""

    def __init__(
        self,
        max_norm: float | None,
        held_once: Sequence[bool],
        group: str | None,
        device: torch.device,
        scale: LossScale | None = None,
    ) -> None:
        super().__init__()
        self.max_norm = max_norm
        self.held_once = tuple(held_once)
        """For each value: whether every element is held by one rank only, so that norms are summed over ranks."""
        self.group = group
        self.device = device
        self.norm: torch.Tensor | None = None
        """As it was last, before clipping."""
        self.scale = scale

    def forward(self, values: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> torch.Tensor:
        replicated: list[torch.Tensor] = []
        sharded: list[torch.Tensor] = []
        for value, once in zip(values, self.held_once, strict=True):
            tensors = [value] if isinstance(value, torch.Tensor) else list(value)
            (sharded if once else replicated).extend(tensors)
        total = square_sum(replicated, self.device)
        if self.group is not None:  # on every rank, whether it holds a part or not
            total = total + wait(all_reduce(square_sum(sharded, self.device), self.group))
        factor = 1.0 if self.scale is None else self.scale.factor
        self.norm = total.sqrt() / factor
        if self.max_norm is None:
            found = torch.ones_like(self.norm)
        else:
            found = torch.clamp(self.max_norm / (self.norm + 1e-6), max=1.0)
        if self.scale is None:
            return found
        is_finite = bool(total.isfinite())
        self.scale.seen(is_finite)
        return found / factor if is_finite else torch.full_like(found, math.nan)


class LossScale(Protocol):
    """The scale of a program's loss."""

    @property
    def factor(self) -> float:
        """The factor that synchronized gradients still carry, of the scale of the loss."""

    def seen(self, is_finite: bool) -> None:
        """Takes note of whether a step's gradients are finite."""


def cut(site: Site, member: Member) -> Any:
    """A member's gradient: the parameter's, or a slice of it."""
    gradient, piece = site.local_gradient(member.slice.name), member.slice
    if piece.whole:
        return gradient
    assert piece.start is not None and piece.stop is not None
    return site.call(torch.narrow, (gradient, piece.dim, piece.start, piece.stop - piece.start))


def square_sum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the squares of all elements, a float64 scalar."""
    held = [t for t in tensors if t.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    held = [torch.view_as_real(t) if t.is_complex() else t for t in held]
    wide = [t if t.dtype in (torch.float32, torch.float64) else t.float() for t in held]
    norms = torch._foreach_norm(wide)
    return torch.stack([n.double() for n in norms]).square().sum()
