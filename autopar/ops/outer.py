"""The outer optimizer of local training: what a rank's own steps have moved, and a step with that of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import Fragment, fragments
from autopar.ops.gradients import MEMBER_START
from autopar.ops.layouts import unsummed
from autopar.ops.values import Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class KeepParameters(Operation):
    """Writes the group's parameters, as they are before this step updates them, into a state, its input, which is its
    value."""

    name = "keep_parameters"
    reads_members = False
    in_place = True
    needs_only_inputs = True

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        read = call.elements * DTYPE_BYTES[call.owner_group.dtype]
        return copied(read + call.bytes, 1 + MEMBER_START * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        module = KeptParameters(fragments(call.owner_group, site.parameters))
        return site.call_module(f"kept_{call.owner_group.index}", module, (site.value_of(call.inputs[0]),))


@dataclass(frozen=True, slots=True)
class OuterGradient(Operation):
    """What this rank's own steps have taken off the parameters that all ranks began with, divided by the number of
    ranks: summed over these, it is the mean, a gradient to descend along.

    Inputs: the parameters that ranks began with, the update of this step and, where what rounding loses is kept, the
    residual, which is overwritten."""

    name = "outer_gradient"
    reads_members = False
    dtype: str
    """In which it is sent."""

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, self.dtype, unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        wide, own = call.inputs[0].bytes, call.elements * DTYPE_BYTES[call.owner_group.dtype]
        rounded = 6 * wide + 2 * call.bytes if len(call.inputs) > 2 else call.bytes
        return copied(6 * wide + own + rounded, 4 + MEMBER_START * len(call.members))

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """The difference, where it is rounded, and what ranks began with, where that is rounded."""
        wide, group = call.inputs[0], call.owner_group
        rounded = wide.bytes if self.dtype != wide.dtype else 0
        return rounded + (call.elements * DTYPE_BYTES[group.dtype] if group.dtype != wide.dtype else 0)

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        own = getattr(torch, group.dtype)
        module = Moved(fragments(group, site.parameters), site.world_size, own, call.torch_dtype)
        arguments = tuple(site.value_of(i) for i in (call.inputs[0], *call.inputs[2:]))
        return site.call_module(f"moved_{group.index}", module, arguments)


@dataclass(frozen=True, slots=True)
class OuterStep(Operation):
    """A step of SGD with Nesterov momentum on the parameters that ranks began with, in place; its value is these, in
    the parameters' own format. Inputs: these parameters, the gradient, and the momentum where there is one."""

    name = "outer_step"
    reads_members = False
    lr: float
    momentum: float

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        wide = call.inputs[0].bytes
        moved = (11 if len(call.inputs) > 2 else 3) * wide
        return copied(moved + (wide + call.bytes if self._rounds(call) else 0), 2 * len(call.inputs))

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return call.bytes if self._rounds(call) else None

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """The gradient in the format that is kept."""
        return call.inputs[0].bytes if call.inputs[1].dtype != call.inputs[0].dtype else 0

    def write(self, site: Site, call: Call) -> Any:
        anchor, gradient, *momentum = map(site.value_of, call.inputs)
        arguments = (anchor, gradient, momentum[0] if momentum else None, self.lr, self.momentum, call.torch_dtype)
        return site.call(outer_step, arguments)

    def _rounds(self, call: Call) -> bool:
        return call.inputs[0].dtype != call.dtype


class KeptParameters(nn.Module):
    """Copies parameters as they are now."""

    def __init__(self, parts: Sequence[Fragment]) -> None:
        super().__init__()
        self.fragments = tuple(parts)

    def forward(self, kept: torch.Tensor) -> torch.Tensor:
        if self.fragments:
            torch._foreach_copy_([f.of(kept) for f in self.fragments], [f.now().detach() for f in self.fragments])
        return kept


class Moved(nn.Module):
    """Differences of kept parameters and those of now, each divided by the number of ranks."""

    def __init__(self, parts: Sequence[Fragment], ranks: int, own: torch.dtype, sent: torch.dtype) -> None:
        """`own`: the parameters' dtype. `sent`: that of the differences."""
        super().__init__()
        self.fragments = tuple(parts)
        self.ranks = ranks
        self.own = own
        self.sent = sent

    def forward(self, kept: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        # Ranks began with these parameters in their own format, which may have rounded them.
        moved = kept.clone() if kept.dtype == self.own else kept.to(self.own).to(kept.dtype)
        if self.fragments:
            torch._foreach_sub_([f.of(moved) for f in self.fragments], [f.now().detach() for f in self.fragments])
        moved.div_(self.ranks)
        if residual is None:
            return moved.to(self.sent)
        residual.add_(moved)
        del moved
        sent = residual.to(self.sent, copy=True)
        residual.sub_(sent)
        return sent


def outer_step(
    anchor: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    lr: float,
    coefficient: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`torch.optim.SGD(lr, momentum, nesterov=True)`: m = c m + g, x = x - lr (g + c m); changes both in place."""
    gradient = gradient.to(anchor.dtype)
    anchor.add_(gradient, alpha=-lr)
    if momentum is not None:
        momentum.mul_(coefficient).add_(gradient)
        anchor.add_(momentum, alpha=-lr * coefficient)
    return anchor.to(dtype)
