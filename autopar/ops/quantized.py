"""Gradients in few bits: what a rank sends of its own, what it makes of the parts that it adds up, and the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from autopar.ir.dtypes import DTYPE_BYTES, wide_dtype
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.group import Group
from autopar.ops.layouts import Shard
from autopar.ops.quantizers import Quantizer
from autopar.ops.step_count import generator_of
from autopar.ops.values import Setting, Value, Work

Fields = tuple[Any, ...]
"""A quantizer's, as the code of a graph can have them."""
KERNELS = 12
"""Of coding a value, or decoding it."""


def part_elements(elements: int, ranks: int, block: int) -> tuple[int, ...]:
    """Elements that each rank adds up: whole blocks, as many on all ranks but where they end."""
    each = -(-elements // (ranks * block)) * block
    return tuple(max(0, min(each, elements - r * each)) for r in range(ranks))


@dataclass(frozen=True, slots=True)
class _Coded(Operation):
    """Codes numbers: of a rank's gradients, or of a part of the sum. `inputs` ends with which of the group's elements
    are left out, where some are; with the number of steps where rounding is stochastic; and with the residual where
    what is lost is kept: it is overwritten."""

    quantizer: Quantizer
    keeps_lost: bool
    leaves_out: bool

    def _coding_work(self, blocks: int, width: int) -> Work:
        """Coded, and decoded again where what is lost is kept."""
        times, q = 1 + self.keeps_lost, self.quantizer
        moved = times * q.moved_bytes(blocks, width) + self.keeps_lost * 3 * width * blocks * q.block
        moved += self.leaves_out * times * (2 * width + 1) * blocks * q.block
        return Work(flops=times * q.flops(blocks), moved_bytes=moved, kernels=times * KERNELS) if blocks else Work()

    def _coding_bytes(self, blocks: int, width: int) -> int:
        """Taken on the way: the filled-up numbers, and what coding or decoding takes."""
        q = self.quantizer
        left_out = self.leaves_out * (width + 2) * blocks * q.block
        return blocks * q.block * width + q.passing_bytes(blocks, width) + left_out

    def _extras(self, site: Site, inputs: Sequence[Call]) -> tuple[Any, Any, Any]:
        """The residual, the number of steps, and what is left out; `None` for what is not there."""
        values = [site.value_of(i) for i in inputs]
        residual = values.pop() if self.keeps_lost else None
        steps = values.pop() if self.quantizer.stochastic else None
        return residual, steps, values.pop() if self.leaves_out else None


@dataclass(frozen=True, slots=True)
class EncodeGradients(_Coded):
    """This rank's gradients, the first input, coded as one message for all ranks, or as a message for each rank, of the
    part that this one adds up."""

    name = "encode_gradients"
    in_parts: bool

    def blocks(self, elements: int, ranks: int) -> int:
        """Filled up, so that all parts have as many."""
        if not self.in_parts:
            return self.quantizer.blocks(elements)
        return -(-elements // (ranks * self.quantizer.block)) * ranks

    def value(self, at: Emission) -> Value:
        message = self.blocks(at.group.elements, at.world_size) * self.quantizer.row_bytes
        return Value(message * at.world_size, "uint8", Shard((message,) * at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        blocks = self.blocks(call.inputs[0].elements, setting.world_size)
        return self._coding_work(blocks, DTYPE_BYTES[wide_dtype(call.inputs[0].dtype)])

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        blocks = self.blocks(call.inputs[0].elements, setting.world_size)
        return self._coding_bytes(blocks, DTYPE_BYTES[wide_dtype(call.inputs[0].dtype)])

    def write(self, site: Site, call: Call) -> Any:
        n, stream = site.world_size, _stream(call.owner_group, site.rank, 0)
        residual, step_count, left_out = self._extras(site, call.inputs[1:])
        blocks, given = self.blocks(call.inputs[0].elements, n), site.value_of(call.inputs[0])
        found = site.call(encode, (given, residual, step_count, astuple(self.quantizer), blocks, stream, left_out))
        each = blocks // n * self.quantizer.row_bytes
        return [found, [each] * n, [each] * n] if self.in_parts else found


@dataclass(frozen=True, slots=True)
class SumAndEncode(_Coded):
    """The sum over ranks of the part that this rank adds up, coded again. Inputs: the messages of all ranks."""

    name = "sum_and_encode"
    wide: str

    def value(self, at: Emission) -> Value:
        n = at.world_size
        message = self._blocks(at.group, n) * self.quantizer.row_bytes
        return Value(message * n, "uint8", Shard((message,) * n))

    def _blocks(self, group: Group, ranks: int) -> int:
        return -(-group.elements // (ranks * self.quantizer.block))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        n, q, width = setting.world_size, self.quantizer, DTYPE_BYTES[self.wide]
        blocks = self._blocks(call.owner_group, n)
        coding, numbers = self._coding_work(blocks, width), blocks * q.block
        moved = n * (q.moved_bytes(blocks, width) + 3 * width * numbers)
        return Work(
            flops=coding.flops + n * q.flops(blocks),
            moved_bytes=coding.moved_bytes + moved,
            kernels=coding.kernels + n * KERNELS,
        )

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        blocks, width = self._blocks(call.owner_group, setting.world_size), DTYPE_BYTES[self.wide]
        return 2 * blocks * self.quantizer.block * width + self._coding_bytes(blocks, width)

    def write(self, site: Site, call: Call) -> Any:
        residual, step_count, left_out = self._extras(site, call.inputs[1:])
        elements, n = call.owner_group.elements, site.world_size
        parts = part_elements(elements, n, self.quantizer.block)
        if left_out is not None:
            left_out = site.call(torch.narrow, (left_out, 0, sum(parts[: site.rank]), parts[site.rank]))
        stream, dtype = _stream(call.owner_group, site.rank, 1), getattr(torch, self.wide)
        arguments = (residual, step_count, astuple(self.quantizer), n, parts[site.rank], stream, dtype, left_out)
        return site.call(sum_and_encode, (site.value_of(call.inputs[0]), *arguments))


@dataclass(frozen=True, slots=True)
class DecodeSum(Operation):
    """The sum over ranks, from what each has sent of its own, or from the coded parts of the sum."""

    name = "decode_sum"
    quantizer: Quantizer
    in_parts: bool
    wide: str

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype)

    def _blocks(self, call: Call) -> int:
        """Of all messages together."""
        return call.inputs[0].elements // self.quantizer.row_bytes

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        q, blocks, width = self.quantizer, self._blocks(call), DTYPE_BYTES[self.wide]
        messages = 1 if self.in_parts else setting.world_size
        added = 0 if self.in_parts else 3 * width * blocks * q.block
        moved = q.moved_bytes(blocks, width) + added + 2 * call.bytes
        return Work(flops=q.flops(blocks), moved_bytes=moved, kernels=messages * KERNELS) if blocks else Work()

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        q, width = self.quantizer, DTYPE_BYTES[self.wide]
        blocks = self._blocks(call) if self.in_parts else self._blocks(call) // setting.world_size
        return 2 * blocks * q.block * width + q.passing_bytes(blocks, width)

    def write(self, site: Site, call: Call) -> Any:
        count = 1 if self.in_parts else site.world_size
        arguments = (site.value_of(call.inputs[0]), astuple(self.quantizer), count, call.elements, call.torch_dtype)
        return site.call(decode_sum, (*arguments, getattr(torch, self.wide)))


def encode(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    step_count: torch.Tensor | None,
    quantizer: Fields,
    blocks: int,
    stream: int,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """uint8 [blocks * row_bytes]. `residual`: changed in place. `left_out`: of each element, whether it is not sent, so
    that all of it stays in the residual."""
    if residual is not None:
        x = residual.add_(gradient)
    else:
        x = gradient.to(getattr(torch, wide_dtype(str(gradient.dtype).removeprefix("torch."))))
    return _encode(x, residual, step_count, Quantizer(*quantizer), blocks, stream, left_out)


def sum_and_encode(
    messages: torch.Tensor,
    residual: torch.Tensor | None,
    step_count: torch.Tensor | None,
    quantizer: Fields,
    ranks: int,
    elements: int,
    stream: int,
    dtype: torch.dtype,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """uint8 [blocks * row_bytes], of the `elements` numbers that this rank adds up, in the order of ranks. `left_out`:
    which of these nobody has sent."""
    total = _sum(messages, Quantizer(*quantizer), ranks, dtype)
    x = total.view(-1)[:elements]
    if left_out is not None:
        x.masked_fill_(left_out, 0)
    if residual is not None:
        x = residual.add_(x)
    return _encode(x, residual, step_count, Quantizer(*quantizer), len(total), stream, left_out)


def decode_sum(
    messages: torch.Tensor, quantizer: Fields, count: int, elements: int, dtype: torch.dtype, wide: torch.dtype
) -> torch.Tensor:
    """[elements]; the sum over `count` messages, in their order, so that all ranks have the same."""
    return _sum(messages, Quantizer(*quantizer), count, wide).view(-1)[:elements].to(dtype, copy=True)


def _encode(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    step_count: torch.Tensor | None,
    quantizer: Quantizer,
    blocks: int,
    stream: int,
    left_out: torch.Tensor | None,
) -> torch.Tensor:
    missing, counted, given = blocks * quantizer.block - len(x), None, x
    if left_out is not None:
        given = x.masked_fill(left_out, 0)
        sent = torch.nn.functional.pad(left_out.logical_not(), (0, missing))
        counted = sent.view(blocks, quantizer.block).sum(1)
    filled = torch.nn.functional.pad(given, (0, missing)).view(blocks, quantizer.block)
    generator = None if step_count is None else generator_of(step_count, stream, x.device)
    message = quantizer.encode(filled, len(x), generator, counted)
    if residual is not None:
        received = quantizer.decode(message, x.dtype).view(-1)[: len(x)]
        residual -= received if left_out is None else received.masked_fill_(left_out, 0)
    return message


def _sum(messages: torch.Tensor, quantizer: Quantizer, count: int, dtype: torch.dtype) -> torch.Tensor:
    """[blocks of a message, block]"""
    each = messages.view(count, -1)
    total = quantizer.decode(each[0], dtype)
    for message in each[1:]:
        total += quantizer.decode(message, dtype)
    return total


def _stream(group: Group, rank: int, phase: int) -> int:
    """Of random numbers: one for each group, rank and phase."""
    return (group.index << 32) + (rank << 1) + phase
