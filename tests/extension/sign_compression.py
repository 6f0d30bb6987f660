"""Signs with a residual: an operation that keeps state, and the strategy that uses it, in one file.

Each rank sends the signs of its gradients, a bit each, and one scale, their mean absolute value; what is lost is added
to the next step's gradients (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019). 1/32 of the elements'
bytes to each other rank, whatever their number, where an all-reduce sends 2 (n-1)/n of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import copied
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.layouts import Shard
from autopar.ops.values import Setting, Value, Work
from autopar.spec.plan import Fidelity
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class EncodeSigns(Operation):
    """This rank's signs and scale, from its gradients and its residual, which is overwritten with what is lost."""

    name = "encode_signs"

    def value(self, at: Emission) -> Value:
        message = -(-at.group.elements // 8) + SCALE_BYTES
        return Value(message * at.world_size, "uint8", Shard((message,) * at.world_size))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        gradient, residual = call.inputs
        return copied(2 * gradient.bytes + 3 * residual.bytes, 8)

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        # A bit is a byte, twice, before it is packed; its weight is another eight, and as many before it is multiplied.
        return 18 * call.inputs[0].elements

    def write(self, site: Site, call: Call) -> Any:
        return site.call(encode, tuple(map(site.value_of, call.inputs)))


@dataclass(frozen=True, slots=True)
class SumSigns(Operation):
    """The sum over ranks of what their messages say."""

    name = "sum_signs"

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return copied(setting.world_size * 3 * call.bytes, 4 * setting.world_size)

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        # Shifted and masked, a bit is eight bytes, and so is each operand meanwhile.
        return 24 * call.elements + 2 * call.bytes

    def write(self, site: Site, call: Call) -> Any:
        gathered = site.value_of(call.inputs[0])
        return site.call(decode, (gathered, site.world_size, call.elements, call.torch_dtype))


def encode(gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """uint8 [elements / 8 + 4]. `residual`: float32, changed in place."""
    residual += gradient
    scale = residual.abs().mean().reshape(1) if len(residual) else residual.new_zeros(1)
    positive = residual >= 0
    residual -= torch.where(positive, scale, -scale)
    padded = torch.nn.functional.pad(positive, (0, -len(positive) % 8)).view(-1, 8)
    bits = (padded * (1 << torch.arange(8, device=padded.device))).sum(1).to(torch.uint8)
    return torch.cat([bits, scale.view(torch.uint8)])


def decode(gathered: torch.Tensor, ranks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum over ranks, in their order, so that all ranks have the same."""
    total = torch.zeros(elements, dtype=dtype, device=gathered.device)
    for message in gathered.view(ranks, -1):
        scale = message[-SCALE_BYTES:].clone().view(torch.float32).to(dtype)
        bits = (message[:-SCALE_BYTES, None] >> torch.arange(8, device=gathered.device)) & 1
        total += torch.where(bits.view(-1)[:elements] == 1, scale, -scale)
    return total


class SignCompression(Strategy):
    name = "sign_compression"
    summary = "gather the signs of all ranks' gradients; what is lost goes into the next step"

    def fidelity(self, options: Options) -> Fidelity:
        return "compressed"

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "what is lost is kept from step to step, so the program needs the optimizer"
        return "its numbers are complex" if member.parameter.spec.dtype.startswith("complex") else None

    def options(self, context: Context) -> Sequence[Options]:
        return [Options()]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        residual = emit.state(group, "residual", dtype="float32")
        signs = emit.emit(EncodeSigns(), group, [emit.pack(group), residual])
        emit.update(emit.emit(SumSigns(), group, [emit.wait(emit.all_gather(signs))]), group)
