"""What strategies share that send gradients in few bits.

With `exchange="gather"` every rank sends its coded gradients to all others, which add up: (n-1) m bytes a rank, where m
is the message's size. With `"parts"` ranks share the elements out: each sends every other one its part, which that one
adds up, codes again and sends to all: about 2 (n-1)/n m bytes, whatever the number of ranks, and rounded twice (the two
phases of 1-bit Adam, Tang et al., ICML 2021). What is lost, in either phase, is added to the next step's numbers where
the quantizer is contractive (error feedback; Karimireddy et al., ICML 2019); an unbiased one keeps nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from autopar.ir.dtypes import wide_dtype
from autopar.ops.base import Call
from autopar.ops.group import Group
from autopar.ops.layouts import REPLICATE, Shard
from autopar.ops.quantized import DecodeSum, EncodeGradients, SumAndEncode, part_elements
from autopar.ops.quantizers import Quantizer
from autopar.ops.step_count import STEP_COUNT, CountSteps
from autopar.strategies.base import Options, Remainder
from autopar.strategies.compressed import Compressed
from autopar.strategies.emitter import Emitter

Exchange = Literal["gather", "parts"]


def _a_power_of_four(block: int) -> int:
    if block not in (16, 64, 256, 1024, 4096):
        raise ValueError(f"blocks have 16, 64, 256, 1024 or 4096 numbers, not {block}")
    return block


Block = Annotated[int, AfterValidator(_a_power_of_four)]
"""Numbers that share a scale."""


class QuantizedExchange(Compressed):
    """Sends gradients through a quantizer, which a subclass makes of its options."""

    def quantizer(self, options: Options) -> Quantizer:
        raise NotImplementedError

    def exchange(self, options: Options) -> Exchange:
        raise NotImplementedError

    def remainder(self, options: Options) -> Remainder:
        quantizer = self.quantizer(options)
        return "kept" if quantizer.is_contractive else "none in the mean" if quantizer.is_unbiased else "lost"

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        if emit.world_size == 1 or not group.elements:
            emit.update(emit.wait(emit.all_reduce(emit.pack(group))), group)
            return
        quantizer, in_parts = self.quantizer(options), self.exchange(options) == "parts"
        emit.update(quantized_sum(emit.pack(group), quantizer, in_parts, emit), group)


def quantized_sum(
    packed: Call, quantizer: Quantizer, in_parts: bool, emit: Emitter, left_out: Call | None = None, of: str = ""
) -> Call:
    """The sum over ranks of what each has packed, on every rank, through a quantizer; what it loses is kept.

    `in_parts`: whether ranks share out what they add up. `left_out`: which elements are kept, and not sent, the same on
    all ranks; what is received of them means nothing. `of`: what the names of residuals begin with, where they are no
    gradients."""
    group = packed.owner_group
    wide, kept = wide_dtype(group.dtype), quantizer.is_contractive
    also, some = [] if left_out is None else [left_out], left_out is not None
    also += [_step_count(group, emit)] if quantizer.stochastic else []
    residual = [emit.state(group, f"{of}residual", dtype=wide)] if kept else []
    messages = emit.emit(EncodeGradients(quantizer, kept, some, in_parts), group, [packed, *also, *residual])
    if in_parts:
        layout = Shard(part_elements(group.elements, emit.world_size, quantizer.block))
        of_parts = [emit.state(group, f"{of}residual_of_sum", layout=layout, dtype=wide)] if kept else []
        received = emit.wait(emit.all_to_all(messages))
        messages = emit.emit(SumAndEncode(quantizer, kept, some, wide), group, [received, *also, *of_parts])
    gathered = emit.wait(emit.all_gather(messages))
    return emit.emit(DecodeSum(quantizer, in_parts, wide), group, [gathered])


def _step_count(group: Group, emit: Emitter) -> Call:
    """How often the group has synchronized."""
    state = emit.state(group, STEP_COUNT, layout=REPLICATE, elements=1, dtype="int64")
    return emit.emit(CountSteps(), group, [state])
