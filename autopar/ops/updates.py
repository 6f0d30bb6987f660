"""The optimizer's update of what a rank holds, and updated parameters on their way into the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from autopar.backends.collectives import note_update
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.fragments import Formed, Fragment, fragments, of_fragments, own_rows, pack, views_of
from autopar.ops.gradients import MEMBER_START
from autopar.ops.products import Product, piece_bytes
from autopar.ops.values import NO_WORK, Bytes, Setting, Value, Work

UPDATE_START = 1.0
"""Time of an optimizer's step to look up one parameter in Python, in units of a kernel's start. [Empirical: 5 to 10
us]"""

Observer = Callable[[Fragment, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Update(Operation):
    """Runs the optimizer on the elements that this rank holds, each in the parameter's own dtype. Its value is the
    updated parameters, in the same layout. Inputs: the gradients; where they are clipped, the coefficient."""

    name = "update"
    reads_members = False
    updates = True
    changes_parameters = True
    makes_parameters = True
    takes_clip = True
    keeps_shards: bool = False
    """Whether the parameters' rows live with the rank that updates them, and nowhere else: rank r has rows r, r+n,
    r+2n, ..."""
    touched: int | None = None
    sent: bool = False
    """Whether a collective sends the updated parameters."""

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, at.inputs[0].layout)

    def when_sent(self) -> Operation:
        return replace(self, sent=True)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        """The optimizer's update of what the rank holds; what is sent is packed again, unless it is one tensor."""
        held, members = call.held_elements(rank), len(call.members)
        if held == 0:
            return NO_WORK
        tensors = float(setting.moved_tensors)
        if call.inputs[0].dtype != call.owner_group.dtype:
            tensors += 1.5
        if self.sent and members > 1:
            tensors += 2
        touched = max(1.0, members * held / call.elements)
        if self.touched is not None:
            held = min(held, self.touched)
        updated = held * DTYPE_BYTES[call.owner_group.dtype] * tensors
        return Work(updated_bytes=updated, kernels=1 + UPDATE_START * touched) if updated else NO_WORK

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        """Bytes that are packed to be sent; one tensor is sent as it is."""
        return call.held_bytes(setting.world_size) if self.sent and len(call.members) > 1 else 0

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """Bytes of gradients in the parameters' dtype, where they came in another one; of clipped gradients; and of a
        piece of those that are formed as they are used."""
        copies = (call.inputs[0].dtype != call.owner_group.dtype) + (len(call.inputs) > 1)
        return copies * call.held_bytes(setting.world_size) + piece_bytes(call.inputs[0], setting)

    def write(self, site: Site, call: Call) -> Any:
        group, held = call.owner_group, call.held_elements(site.rank)
        if held == 0 and not (self.sent and call.sizes):
            return site.empty(call) if self.sent and call.elements == 0 else None
        begin = sum(call.sizes[: site.rank])
        if self.keeps_shards:
            pieces = own_rows(group, site.shards, site.rank, site.world_size)
        else:
            pieces = fragments(group, site.parameters, begin, begin + held)
        sent_as, may_skip = call.torch_dtype if self.sent else None, site.loss_scale is not None
        module = Step(site.part(group.index, pieces), sent_as, site.device, may_skip)
        return site.call_module(f"update_{group.index}", module, tuple(map(site.value_of, call.inputs)))


@dataclass(frozen=True, slots=True)
class Store(Operation):
    """Writes received parameter values into the parameters."""

    name = "store"
    reads_members = False
    changes_parameters = True
    in_place = True
    sent_by: int | None = None
    """The rank that has the values already: the owner, where they came by broadcast; `None` where no rank does."""

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        if rank == self.sent_by:
            return NO_WORK
        return copied(2 * call.bytes, 1 + MEMBER_START * len(call.members))

    def differs_on(self, call: Call) -> Sequence[int]:
        return () if self.sent_by is None else (self.sent_by,)

    def write(self, site: Site, call: Call) -> Any:
        module = site.stored(call.owner_group, self.sent_by)
        if module is None:
            return None
        return site.call_module(f"store_{call.owner_group.index}", module, (site.value_of(call.inputs[0]),))


@dataclass(frozen=True, slots=True)
class Free(Operation):
    """Frees elements of a value. Nothing is done: a graph frees what is not read behind it."""

    name = "free"
    reads_members = False
    needs_only_inputs = True
    elements: int = 0

    def value(self, at: Emission) -> Value:
        return replace(at.inputs[0].made, elements=self.elements, expected=False)

    def freed_elements(self) -> int:
        return self.elements

    def write(self, site: Site, call: Call) -> Any:
        return None


class OptimizerPart(Protocol):
    """The optimizer over the fragments that a rank holds of a sync group."""

    fragments: tuple[Fragment, ...]

    def step(self, gradients: Sequence[Formed]) -> None:
        """Updates the fragments."""


class Step(nn.Module):
    """Runs the optimizer on the fragments that this rank holds; returns them packed, to be sent, where asked to."""

    def __init__(
        self, part: OptimizerPart, sent_as: torch.dtype | None, device: torch.device, may_skip: bool = False
    ) -> None:
        """`may_skip`: whether nothing is updated where the coefficient is not finite."""
        super().__init__()
        self.may_skip = may_skip
        self.part = part
        self.sent_as = sent_as
        self.device = device
        self.observer: Observer | None = None
        """Is shown each fragment's synchronized gradient before the update; for verification."""
        self.unclipped: Observer | None = None
        """Is shown the same before it is clipped."""

    def forward(
        self, gradients: torch.Tensor | Sequence[torch.Tensor | Product], clip: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """`gradients`: the flat value this rank holds, or one for each parameter."""
        parts = self.part.fragments
        views: list[Formed]
        if self.may_skip and clip is not None and not clip.isfinite():
            views = []
        elif isinstance(gradients, torch.Tensor):
            of, dtype = views_of(parts, gradients), gradients.dtype
            views = [v if f.tensor.dtype is dtype else v.to(f.tensor.dtype) for f, v in zip(parts, of, strict=True)]
        else:
            views = of_fragments(parts, gradients)
        if self.unclipped is not None:
            _show(self.unclipped, parts, views)
        if clip is not None and views:
            tensors = [v for v in views if isinstance(v, torch.Tensor)]
            assert len(tensors) == len(views), "gradients that are clipped are whole"
            # Out of place: with one rank, two parameters may have one and the same gradient tensor.
            views = list(torch._foreach_mul(tensors, clip.to(tensors[0].dtype)))
        if self.observer is not None:
            _show(self.observer, parts if views else (), views)
        if views:
            for fragment in parts:
                fragment.read()
            if self.sent_as is None:  # else what is sent makes replicas equal
                note_update()
            self.update(views)
            if self.sent_as is None:
                note_update()
            for fragment in parts:
                fragment.write()
        if self.sent_as is None:
            return None
        if not parts:
            return torch.empty(0, dtype=self.sent_as, device=self.device)
        if len(parts) == 1 and parts[0].tensor.is_contiguous():
            return parts[0].tensor.detach().view(-1)
        return pack([f.tensor.detach() for f in parts], self.sent_as)

    def update(self, gradients: Sequence[Formed]) -> None:
        """Runs the optimizer on the gradients that it is to be run on."""
        self.part.step(gradients)


def _show(observer: Observer, parts: Sequence[Fragment], views: Sequence[Formed]) -> None:
    for fragment, view in zip(parts, views, strict=True):
        formed = view if isinstance(view, torch.Tensor) else view()
        observer(fragment, formed.to_dense() if formed.is_sparse else formed)


class Received(nn.Module):
    """Writes received parameter values into the parameters."""

    def __init__(self, parts: Sequence[Fragment]) -> None:
        super().__init__()
        self.fragments = tuple(parts)

    def forward(self, flat: torch.Tensor) -> None:
        if self.fragments:
            torch._foreach_copy_([f.now() for f in self.fragments], views_of(self.fragments, flat))
