"""Adam with a frozen variance: what of its momentum each rank sends, and the update with the momentum of all.

Everything is in units of gradients, so that a rank's residual is one of gradients, too: a momentum m of Adam, an
average of which the newest gradient is a part of 1 - beta1, is m / (1 - beta1) here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from autopar.backends.collectives import note_update
from autopar.errors import AutoparWarning, OptimizerError
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import Fragment, fragments
from autopar.ops.gradients import MEMBER_START
from autopar.ops.layouts import REPLICATE, unsummed
from autopar.ops.updates import UPDATE_START, Step
from autopar.ops.values import Bytes, Setting, Value, Work

TENSORS = 16
"""Tensors of the parameters' size that an update reads and writes: the momentum is copied, the variance scaled, its
root divided, added to and divided by, the parameter decayed and changed."""


class OptimizerPart(Protocol):
    """The optimizer over the fragments of a sync group: Adam, or AdamW."""

    fragments: tuple[Fragment, ...]

    def step(self, gradients: Any) -> None:
        """Updates the fragments."""

    def state(self) -> list[tuple[Fragment, dict[str, Any]]]:
        """What it keeps of each fragment."""

    def settings(self) -> list[Mapping[str, Any]]:
        """Of each fragment: those of its parameter group."""

    def step_frozen(self, momenta: Sequence[torch.Tensor]) -> None:
        """Updates each fragment with a momentum, which becomes its own, and leaves its variance as it is."""


@dataclass(frozen=True, slots=True)
class WithoutVariance(Operation):
    """Which of the group's elements have no variance to be divided by, as their gradients have always been zero."""

    name = "without_variance"
    reads_members = False

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, "bool", REPLICATE)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        read = call.elements * DTYPE_BYTES[call.owner_group.dtype]
        return copied(read + call.bytes, 1 + MEMBER_START * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        module = Unvaried(_part(site, call), call.elements, site.device)
        return site.call_module(f"unvaried_{call.owner_group.index}", module, ())


@dataclass(frozen=True, slots=True)
class GrowMomentum(Operation):
    """This rank's part of the momentum: its gradients, and its share of beta1 / (1 - beta1) times the momentum that all
    ranks have. Inputs: the gradients, and which elements have no variance; on one rank, which sends nothing, also the
    residual, which takes what these get."""

    name = "grow_momentum"
    reads_members = False
    dtype: str

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, self.dtype, unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        own, kept = call.elements * DTYPE_BYTES[call.owner_group.dtype], 5 * call.bytes * (len(call.inputs) > 2)
        return copied(3 * call.bytes + 2 * own + kept, 2 + 2 * MEMBER_START * len(call.members))

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """What is looked at where an element has no variance."""
        return 2 * call.elements + (len(call.inputs) > 2) * call.bytes

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        module = Grown(_part(site, call), site.world_size, call.elements, call.torch_dtype, site.device)
        return site.call_module(f"grown_{group.index}", module, tuple(map(site.value_of, call.inputs)))


@dataclass(frozen=True, slots=True)
class TakeMomentum(Operation):
    """Adam's momentum, from the sum over ranks of its parts, in place; none where an element has no variance. Inputs:
    the sum, and which elements these are."""

    name = "take_momentum"
    reads_members = False
    in_place = True

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(4 * call.bytes + call.inputs[1].bytes, 1 + MEMBER_START * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        module = Taken(_part(site, call))
        return site.call_module(f"taken_{call.owner_group.index}", module, tuple(map(site.value_of, call.inputs)))


@dataclass(frozen=True, slots=True)
class FrozenUpdate(Operation):
    """Runs Adam with a momentum that is given to it, and leaves its variance as it is. Inputs: the momentum; where it
    is clipped, the coefficient."""

    name = "frozen_update"
    reads_members = False
    updates = True
    changes_parameters = True
    makes_parameters = True
    takes_clip = True

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, at.inputs[0].layout)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return Work(updated_bytes=float(call.bytes * TENSORS), kernels=10 + UPDATE_START * len(call.members))

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return 0

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """The root of the variance; and the momentum, where it is clipped."""
        return (1 + (len(call.inputs) > 1)) * call.bytes

    def write(self, site: Site, call: Call) -> Any:
        module = FrozenStep(_part(site, call), None, site.device)
        return site.call_module(f"update_{call.owner_group.index}", module, tuple(map(site.value_of, call.inputs)))


class Unvaried(nn.Module):
    """Looks at the optimizer's variance."""

    def __init__(self, part: OptimizerPart, elements: int, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self.elements = elements
        self.device = device

    def forward(self) -> torch.Tensor:
        """bool [elements]. Raises `OptimizerError`, on all ranks alike, where no parameter of the group has any."""
        found = torch.ones(self.elements, dtype=torch.bool, device=self.device)
        states = self.part.state() if self.part.fragments else []
        for fragment, state in states:
            if "exp_avg_sq" in state:
                torch.eq(state["exp_avg_sq"], 0, out=fragment.of(found))
        if states and not any(state for _, state in states):
            raise OptimizerError(
                f"one_bit_adam goes on from the variance that exact steps have left, and the optimizer has none of "
                f"'{states[0][0].name}', nor of any other parameter of its group: load a checkpoint that has the "
                "optimizer's state, or begin later, with from_step=S behind the step that cleared it"
            )
        return found


class Grown(nn.Module):
    """Adds the share of the momentum to a rank's gradients."""

    def __init__(
        self, part: OptimizerPart, ranks: int, elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.part = part
        self.ranks = ranks
        self.elements = elements
        self.dtype = dtype
        self.device = device
        self._looks = 0
        self._said = False

    def forward(
        self,
        given: torch.Tensor | Sequence[torch.Tensor],
        without: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[elements]. `given`: flat, or, on one rank, the gradient of each parameter."""
        found = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        parts = self.part.fragments
        if not parts:
            return found
        if isinstance(given, torch.Tensor):
            found.copy_(given)
        else:
            torch._foreach_copy_([f.of(found) for f in parts], list(given))
        self._look(found, without)
        each = zip(parts, self.part.state(), self.part.settings(), strict=True)
        for fragment, (_, state), settings in each:
            own, beta, share = fragment.of(found), float(settings["betas"][0]), _sign(settings) / self.ranks
            if settings["weight_decay"] and not decoupled(settings):
                own.add_(fragment.now().detach(), alpha=settings["weight_decay"] * share)
            if "exp_avg" in state:
                own.add_(state["exp_avg"], alpha=beta / (1 - beta) * share)
        if residual is not None:
            residual.add_(found.masked_fill(without.logical_not(), 0))
        return found

    def _look(self, gradients: torch.Tensor, without: torch.Tensor) -> None:
        """Warns, once on each rank, where an element has no variance, and a gradient all the same. At powers of two of
        steps, as the host waits for what it reads."""
        self._looks += 1
        if self._said or self._looks & (self._looks - 1):
            return
        late = gradients.ne(0).logical_and_(without)
        names = [f.name for f in self.part.fragments if bool(f.of(late).any())]
        if names:
            self._said = True
            warnings.warn(
                f"one_bit_adam: {int(late.sum())} element(s) have gradients now that had none before from_step, the "
                f"first in '{names[0]}'. Their variance is frozen at zero, so they stay as they are. Begin later, with "
                f"a greater from_step, or pin '{names[0]}' to all_reduce",
                AutoparWarning,
                stacklevel=2,
            )


class Taken(nn.Module):
    """Makes Adam's momentum of a sum in units of gradients."""

    def __init__(self, part: OptimizerPart) -> None:
        super().__init__()
        self.part = part

    def forward(self, summed: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
        """Overwrites `summed`."""
        for fragment, settings in zip(self.part.fragments, self.part.settings(), strict=True):
            fragment.of(summed).mul_(_sign(settings) * (1 - float(settings["betas"][0])))
        return summed.masked_fill_(without, 0)


class FrozenStep(Step):
    """Updates with a momentum; observers are shown the gradient that it would be Adam's next one with."""

    part: OptimizerPart

    def forward(  # type: ignore[override]
        self, momentum: torch.Tensor, clip: torch.Tensor | None = None
    ) -> None:
        parts = self.part.fragments
        if self.unclipped is not None:
            self._show_gradients(self.unclipped, momentum)
        if clip is not None:
            momentum = momentum * clip.to(momentum.dtype)
        if self.observer is not None:
            self._show_gradients(self.observer, momentum)
        for fragment in parts:
            fragment.read()
        note_update()
        self.part.step_frozen([f.of(momentum).to(f.tensor.dtype) for f in parts])
        note_update()
        for fragment in parts:
            fragment.write()

    def _show_gradients(self, observer: Any, momentum: torch.Tensor) -> None:
        each = zip(self.part.state(), self.part.settings(), strict=True)
        for (fragment, state), settings in each:
            beta, found = float(settings["betas"][0]), fragment.of(momentum).clone()
            if "exp_avg" in state:
                found.sub_(state["exp_avg"], alpha=beta)
            found.div_(1 - beta)
            if settings["weight_decay"] and not decoupled(settings):
                found.sub_(fragment.now().detach(), alpha=settings["weight_decay"])
            observer(fragment, found.mul_(_sign(settings)))


def decoupled(settings: Mapping[str, Any]) -> bool:
    """Whether weights decay beside the gradient, as AdamW's do, and not as a part of it."""
    return bool(settings["decoupled_weight_decay"])


def _sign(settings: Mapping[str, Any]) -> int:
    """That of a gradient in the momentum: Adam that maximizes turns gradients around."""
    return -1 if settings.get("maximize") else 1


def _part(site: Site, call: Call) -> Any:
    group = call.owner_group
    return site.part(group.index, fragments(group, site.parameters))
