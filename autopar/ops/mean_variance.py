"""The second moment that Adam would have of the mean gradient, where each rank has only its own.

A rank's own gradient is the mean gradient and noise, of which the mean over n ranks keeps an n-th. So its square is up
to n times as large, and Adam, which divides by its root, takes steps that are up to sqrt(n) times too short (the square
root rule of Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022, arXiv
2205.10287). How much of the own square the mean's is, the common part, ranks find out when they synchronize: from the
squared norms of short sketches of their gradients, and from that of the mean of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import OptimizerError
from autopar.ir.dtypes import DTYPE_BYTES, wide_dtype
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import Fragment, fragments
from autopar.ops.frozen_adam import decoupled
from autopar.ops.group import Group
from autopar.ops.layouts import unsummed
from autopar.ops.updates import Step, Update
from autopar.ops.values import Bytes, Setting, Value, Work

SECOND = "exp_avg_sq"
"""What Adam calls its second moment."""
SKETCH = 128
"""Numbers of a sketch. Its squared norm is off by a part of sqrt(2 / SKETCH), an eighth, and by nothing in the mean;
the second moment is an average over many synchronizations. Of gradients that are alike, so are sketches."""
SIGNS = (65_537, 65_539)
"""An element's sign is a product of two, which come again after so many elements, and together after four thousand
million."""
LEAST = 0.25
"""The least common part, in units of that of noise alone, 1 / ranks: less is what a sketch is off by."""
SKETCHED = 1 + SKETCH
"""Numbers that a rank sends of each parameter: the sketch, and its squared norm."""


class OptimizerPart(Protocol):
    """The optimizer over the fragments of a sync group: Adam, or AdamW."""

    fragments: tuple[Fragment, ...]

    def step(self, gradients: Any) -> None:
        """Updates the fragments."""

    def state(self) -> list[tuple[Fragment, dict[str, Any]]]:
        """What it keeps of each fragment."""

    def settings(self) -> list[Mapping[str, Any]]:
        """Of each fragment: those of its parameter group."""


def gradients_of(group: Group) -> int:
    """How many of a group's parameters have elements, and so a gradient."""
    return sum(member.elements > 0 for member in group.members)


@dataclass(frozen=True, slots=True)
class SketchGradients(Operation):
    """Of each of the group's gradients on this rank, its input, a sketch and the squared norm of that, divided by the
    number of ranks: summed over these, the sketch of the mean gradient, and the mean of the squared norms."""

    name = "sketch_gradients"
    reads_members = False

    def value(self, at: Emission) -> Value:
        return Value(gradients_of(at.group) * SKETCHED, wide_dtype(at.group.dtype), unsummed(at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        gradients = call.inputs[0]
        wide = gradients.elements * DTYPE_BYTES[call.dtype]
        return copied(gradients.bytes + 4 * wide + 7 * gradients.elements, 9 * gradients_of(call.owner_group))

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """The signs, and the gradients with these, of the largest parameter."""
        largest = max(member.elements for member in call.members)
        return largest * (3 + 2 * DTYPE_BYTES[call.dtype])

    def write(self, site: Site, call: Call) -> Any:
        index = call.owner_group.index
        module = Sketches(index, site.world_size, call.torch_dtype, site.device)
        return site.call_module(f"sketched_{index}", module, (site.value_of(call.inputs[0]),))


@dataclass(frozen=True, slots=True)
class TakeCommonParts(Operation):
    """Overwrites a state, its first input, with the common part of each gradient: the square of the mean one, over the
    mean of the squares. What had no gradient on any rank, or one that is not finite, keeps what it had. Inputs: the
    state; the sum over ranks; further ones read the state before."""

    name = "take_common_parts"
    reads_members = False
    in_place = True
    needs_only_inputs = True

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(3 * call.inputs[1].bytes, 10)

    def write(self, site: Site, call: Call) -> Any:
        return site.call(take_common_parts, (*map(site.value_of, call.inputs[:2]), site.world_size))


@dataclass(frozen=True, slots=True)
class UpdateOfMean(Update):
    """Runs Adam with this rank's own gradients; its second moment takes the common part of their squares, and no more.
    Inputs: the gradients; the common parts; where gradients are clipped, the coefficient."""

    name = "update_of_mean"

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        own = Update.work(self, call, rank, setting)
        moved, kernels = own.moved_bytes + 6 * call.bytes, own.kernels + 4 * gradients_of(call.owner_group)
        return own._replace(moved_bytes=moved, kernels=kernels)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """A part of the gradient of the largest parameter; and clipped gradients."""
        largest = max(m.elements for m in call.members) * DTYPE_BYTES[call.owner_group.dtype]
        return largest + (len(call.inputs) > 2) * call.bytes

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        module = MeanStep(site.part(group.index, fragments(group, site.parameters)), None, site.device)
        return site.call_module(f"update_{group.index}", module, tuple(map(site.value_of, call.inputs)))


class MeanStep(Step):
    """Updates with a second moment, v, that grows by (1 - beta2) f g^2, f being the common part, and no more."""

    part: OptimizerPart
    common: torch.Tensor

    def forward(  # type: ignore[override]
        self, gradients: Sequence[torch.Tensor], common: torch.Tensor, clip: torch.Tensor | None = None
    ) -> None:
        """`common`: of each fragment; 0 where it is not known yet, and all is taken."""
        self.common = torch.where(common > 0, common, 1)
        super().forward(gradients, clip)

    def update(self, gradients: Sequence[Any]) -> None:
        """What v is not to take is taken off before, so that Adam divides by no root of it; where there is no v yet,
        behind the step."""
        taken, begins = [], []
        each = zip(self.part.state(), self.part.settings(), gradients, self.common, strict=True)
        for place, ((fragment, state), settings, gradient, part) in enumerate(each):
            if SECOND not in state:
                begins.append(place)
                continue
            if settings["weight_decay"] and not decoupled(settings):  # of which Adam's gradients are a part
                gradient = gradient.add(fragment.tensor.detach(), alpha=settings["weight_decay"])
            if not (beta := float(settings["betas"][1])):
                raise OptimizerError(
                    f"local_adam corrects Adam's second moment, of which beta2=0 keeps nothing for '{fragment.name}': "
                    "set a greater one, or use all_reduce with every=K"
                )
            factor = ((1 - part) * ((1 - beta) / beta)).to(gradient.dtype)
            state[SECOND].addcmul_(gradient * factor, gradient, value=-1)
            taken.append((state, state["step"].clone(), gradient, factor))
        self.part.step(gradients)
        for state, count, gradient, factor in taken:
            not_updated = state["step"] == count  # where a parameter has no gradient in this step
            if not (not_updated.is_cpu and not not_updated):
                state[SECOND].addcmul_(gradient * (factor * not_updated), gradient)
        states = self.part.state() if begins else []
        for moment, part in [(states[i][1].get(SECOND), self.common[i]) for i in begins]:
            if moment is not None:
                moment.mul_(part.to(moment.dtype))


class Sketches(nn.Module):
    """Sketches gradients, each divided by the number of ranks: sums of their elements with random signs, a count sketch
    (Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", ICALP 2002), or the elements themselves
    where these are no more than its numbers."""

    def __init__(self, stream: int, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        """`stream`: of which the signs are, the same on all ranks."""
        super().__init__()
        self.ranks = ranks
        self.dtype = dtype
        draws = torch.Generator().manual_seed(stream)
        tables = (torch.randint(0, 2, (period,), generator=draws, dtype=torch.int8) for period in SIGNS)
        self.tables = tuple(table.mul_(2).sub_(1).to(device) for table in tables)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """[gradients * SKETCHED]: of each, the sketch, and its squared norm."""
        found = []
        for gradient in gradients:
            flat = gradient.reshape(-1).to(self.dtype)
            if len(flat) > SKETCH:
                flat = flat * self._signs(len(flat))
            sketch = F.pad(flat, (0, -len(flat) % SKETCH)).view(-1, SKETCH).sum(0)
            found += [sketch, sketch.dot(sketch)[None]]
        return torch.cat(found).div_(self.ranks)

    def _signs(self, count: int) -> torch.Tensor:
        one, other = (table.repeat(-(-count // len(table)))[:count] for table in self.tables)
        return one * other


def take_common_parts(state: torch.Tensor, summed: torch.Tensor, ranks: int) -> torch.Tensor:
    """Changes the state in place."""
    rows = summed.view(-1, SKETCHED)
    parts = rows[:, :-1].square().sum(1) / rows[:, -1]
    is_known = parts.isfinite() & (rows[:, -1] > 0)
    return state.copy_(torch.where(is_known, parts.clamp(LEAST / ranks, 1), state))
