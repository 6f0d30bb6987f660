"""Differences of parameters that one rank updates each, to what all ranks have: coded, sent, and added everywhere.

The rank that updates an element has it exactly, as what all ranks have plus what these lack, its state `lacking`. While
it updates, the state holds what all have, and the parameter what is exact.
"""

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
from autopar.ops.layouts import REPLICATE, Shard
from autopar.ops.quantized import KERNELS, part_elements
from autopar.ops.quantizers import Quantizer
from autopar.ops.values import NO_WORK, Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class TakeExact(Operation):
    """Writes what is exact of the parameters that this rank updates into these, and into the state what all ranks have
    of them. Inputs: the gradients to update with, which are its value, and the state."""

    name = "take_exact"
    reads_members = False
    changes_parameters = True
    in_place = True

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        state = call.inputs[1]
        held = state.held_elements(rank)
        if not held:
            return NO_WORK
        moved = held * (5 * DTYPE_BYTES[state.dtype] + 3 * DTYPE_BYTES[call.owner_group.dtype])
        return copied(moved, 3 + MEMBER_START * len(call.members))

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """What is exact."""
        return call.inputs[1].held_bytes(setting.world_size)

    def write(self, site: Site, call: Call) -> Any:
        gradients, state = map(site.value_of, call.inputs)
        if state is None:
            return gradients
        name = f"exact_{call.owner_group.index}"
        return site.call_module(name, TakenExact(_own(site, call, call.inputs[1])), (gradients, state))


@dataclass(frozen=True, slots=True)
class EncodeDifferences(Operation):
    """Codes what this rank's parameters are more than what all ranks have, which is written into them again; the state
    then holds what is exact. Inputs: the updated parameters, and the state."""

    name = "encode_differences"
    reads_members = False
    changes_parameters = True
    makes_parameters = True
    quantizer: Quantizer

    def value(self, at: Emission) -> Value:
        n = at.world_size
        message = self._blocks(at.group.elements, n) * self.quantizer.row_bytes
        return Value(message * n, "uint8", Shard((message,) * n))

    def _blocks(self, elements: int, ranks: int) -> int:
        """As many for all ranks."""
        return -(-elements // (ranks * self.quantizer.block))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        blocks, width = self._blocks(call.owner_group.elements, setting.world_size), self._width(call)
        held = call.inputs[1].held_elements(rank)
        moved = self.quantizer.moved_bytes(blocks, width) + 9 * width * held
        return Work(flops=self.quantizer.flops(blocks), moved_bytes=moved, kernels=KERNELS + 4) if blocks else NO_WORK

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """The difference, filled up, what coding takes, and what all ranks have."""
        blocks, width = self._blocks(call.owner_group.elements, setting.world_size), self._width(call)
        return 3 * blocks * self.quantizer.block * width + self.quantizer.passing_bytes(blocks, width)

    def write(self, site: Site, call: Call) -> Any:
        updated, state = call.inputs
        blocks = self._blocks(call.owner_group.elements, site.world_size)
        module = EncodedDifferences(_own(site, call, state), self.quantizer, blocks, state.torch_dtype, site.device)
        arguments = site.value_of(updated), site.value_of(state)
        return site.call_module(f"differences_{call.owner_group.index}", module, arguments)

    def _width(self, call: Call) -> int:
        return DTYPE_BYTES[call.inputs[1].dtype]


@dataclass(frozen=True, slots=True)
class AddDifferences(Operation):
    """Adds the differences that all ranks have sent to the parameters of every rank; without a quantizer, these are
    whole parameters. What is lacking then of those that this rank updates goes into the state. Inputs: what was
    received, and the state."""

    name = "add_differences"
    reads_members = False
    changes_parameters = True
    quantizer: Quantizer | None

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, REPLICATE)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        q, elements = self.quantizer, call.elements
        width, own = DTYPE_BYTES[call.inputs[1].dtype], DTYPE_BYTES[call.dtype]
        starts = 2 + MEMBER_START * len(call.members)
        if q is None:
            return copied(2 * call.bytes, starts)
        blocks = call.inputs[0].elements // q.row_bytes
        lacking = 3 * width * call.inputs[1].held_elements(rank)
        moved = q.moved_bytes(blocks, width) + elements * (width + 2 * own) + lacking
        return Work(flops=q.flops(blocks), moved_bytes=moved, kernels=KERNELS + starts)

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return 0

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """What is decoded, and the sums where parameters are in 16 bits."""
        if self.quantizer is None:
            return 0
        width = DTYPE_BYTES[call.inputs[1].dtype]
        blocks = call.inputs[0].elements // self.quantizer.row_bytes
        narrow = call.dtype != call.inputs[1].dtype
        return (1 + narrow) * blocks * self.quantizer.block * width + self.quantizer.passing_bytes(blocks, width)

    def write(self, site: Site, call: Call) -> Any:
        group, (received, state) = call.owner_group, call.inputs
        parts = fragments(group, site.parameters)
        module = AddedDifferences(parts, _own(site, call, state), self.quantizer, state.torch_dtype)
        site.call_module(f"added_{group.index}", module, (site.value_of(received), site.value_of(state)))
        return None


class TakenExact(nn.Module):
    """Exchanges what all ranks have and what is exact."""

    def __init__(self, own: Sequence[Fragment]) -> None:
        super().__init__()
        self.own = tuple(own)

    def forward(self, gradients: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """`state`: what is lacking; overwritten with what all ranks have."""
        theirs, there = [f.now().detach() for f in self.own], [f.of(state) for f in self.own]
        exact = torch._foreach_add(there, theirs)
        torch._foreach_copy_(there, theirs)
        for fragment, value in zip(self.own, exact, strict=True):
            fragment.put(value)
        return gradients


class EncodedDifferences(nn.Module):
    """Codes what was updated less what all ranks have."""

    def __init__(
        self, own: Sequence[Fragment], quantizer: Quantizer, blocks: int, wide: torch.dtype, device: torch.device
    ) -> None:
        """`blocks`: of a message."""
        super().__init__()
        self.own = tuple(own)
        self.quantizer = quantizer
        self.blocks = blocks
        self.wide = wide
        self.device = device

    def forward(self, updated: torch.Tensor | None, state: torch.Tensor | None) -> torch.Tensor:
        """uint8 [blocks * row_bytes]. `state`: what all ranks have; overwritten with what is exact."""
        x = torch.zeros(self.blocks * self.quantizer.block, dtype=self.wide, device=self.device)
        count = 0
        if state is not None and updated is not None:
            count = len(state)
            torch.sub(updated.to(self.wide), state, out=x[:count])
            theirs = state.clone()
            state.copy_(updated)  # which may lie in the parameter's own memory
            for fragment in self.own:
                fragment.put(fragment.of(theirs))
        return self.quantizer.encode(x.view(self.blocks, self.quantizer.block), count)


class AddedDifferences(nn.Module):
    """Adds what was received to all parameters."""

    def __init__(
        self,
        parts: Sequence[Fragment],
        own: Sequence[Fragment],
        quantizer: Quantizer | None,
        wide: torch.dtype,
    ) -> None:
        """`parts`: of the whole group. `own`: of what this rank updates."""
        super().__init__()
        self.fragments = tuple(parts)
        self.own = tuple(own)
        self.quantizer = quantizer
        self.wide = wide

    def forward(self, received: torch.Tensor, state: torch.Tensor | None) -> None:
        """`state`: what is exact; overwritten with what all ranks lack of it."""
        if self.quantizer is None:
            for fragment in self.fragments:
                fragment.put(fragment.of(received))
            if state is not None:
                state.zero_()
            return
        added = self.quantizer.decode(received, self.wide).view(-1)
        for fragment in self.fragments:
            now = fragment.now().detach()
            fragment.put(fragment.of(added).add_(now))
        if state is not None:
            torch._foreach_sub_([f.of(state) for f in self.own], [f.now().detach() for f in self.own])


def whole_blocks(elements: int, ranks: int, block: int) -> tuple[int, ...]:
    """Elements that each rank updates: whole blocks of what is sent, but where they end."""
    return part_elements(elements, ranks, block)


def _own(site: Site, call: Call, state: Call) -> tuple[Fragment, ...]:
    """What this rank updates."""
    begin = sum(state.sizes[: site.rank])
    return fragments(call.owner_group, site.parameters, begin, begin + state.held_elements(site.rank))
