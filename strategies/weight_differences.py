"""Weight differences: each rank updates a part of the parameters, and sends by how much they changed, in few bits.

As `partitioned_parameter_server` (ZeRO stage 1), but what is gathered is, of each part, the difference of its exact
parameters and what all ranks have, in whole numbers of 8 or 4 bits and a scale for each block. Differences are much
smaller than parameters, and so are their scales (SDP4Bit, Jia et al., NeurIPS 2024; QSDP, Markov et al., ICML 2023,
sends the parameters themselves). All ranks add the same numbers to the same parameters, the one that updates them as
well, so that replicas are equal to the last bit.

1. Gradients are summed to the owners of elements, who clip, and update what is exact: y + e, of y that all ranks have
   and compute with, and e that only the owner has.
2. Each owner sends C(x - y), of the updated x, and all ranks go on from y + C(x - y); e is what that lacks of x. What
   is lost is thereby in the next difference, as error feedback has it, and no optimizer comes between.

Each rank sends (n-1)/n (w + bits/8 + 4/block) bytes an element, w those of a gradient's number: of an all-reduce in 32
bits 63 % with 8 bits and 56 % with 4; with gradients in 16 bits 38 and 31 %. It keeps 1/n of the optimizer's state and
does 1/n of its work, and keeps e besides. It wins where ZeRO stage 1 does and what is gathered is waited for. Gradients
are those at y, which is off x by half a step of a code: 1/14 of a block's largest change with 4 bits, 1/254 with 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autopar.ir.dtypes import WireDtype, wide_dtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.layouts import Shard
from autopar.ops.quantizers import Quantizer
from autopar.ops.weight_differences import AddDifferences, EncodeDifferences, TakeExact, whole_blocks
from autopar.strategies.base import Options, Remainder
from autopar.strategies.compressed import Compressed
from autopar.strategies.emitter import Emitter
from autopar.strategies.partitioned_parameter_server import PartitionedParameterServer
from autopar.strategies.quantized_exchange import Block


class WeightDifferencesOptions(Options):
    bits: Literal[4, 8] = 8
    """Of each difference on the wire."""
    block: Block = 256
    """Numbers that share a scale: 16, 64, 256, 1024 or 4096."""
    rotated: bool = False
    """Whether each block is multiplied with a Hadamard matrix first, which spreads outliers; it takes longer."""
    wire: WireDtype = "same"
    """Number format of the gradients on the wire; what a narrower one rounds is lost."""


class WeightDifferences(Compressed):
    name = "weight_differences"
    summary = "reduce-scatter; every rank updates its slice; all-gather what changed, in 8 or 4 bits"
    options_type = WeightDifferencesOptions
    warms_up = True

    def applies(self, member: Member, context: Context) -> str | None:
        return super().applies(member, context) or PartitionedParameterServer().applies(member, context)

    def options(self, context: Context) -> Sequence[WeightDifferencesOptions]:
        return [
            WeightDifferencesOptions(),
            WeightDifferencesOptions(wire="bfloat16"),
            WeightDifferencesOptions(bits=4, wire="bfloat16"),
            WeightDifferencesOptions(bits=4),
        ]

    def remainder(self, options: Options) -> Remainder:
        assert isinstance(options, WeightDifferencesOptions)
        return "kept" if options.wire == "same" else "lost"

    def keeps_gradients(self, options: Options) -> bool:
        return False  # what it keeps is of parameters

    def moves_frozen(self, options: Options) -> bool:
        return True  # replicas still lack some of the exact parameters

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, WeightDifferencesOptions)
        exactly = group.moment.doing == "plain"
        if emit.world_size == 1 or not group.elements:
            emit.update(emit.wait(emit.all_reduce(emit.pack(group))), group)
            return
        sizes = whole_blocks(group.elements, emit.world_size, options.block)
        wire: WireDtype = "same" if exactly else options.wire
        shard = emit.wait(emit.reduce_scatter(emit.pack(group, wire), sizes))
        layout, wide = Shard(sizes), wide_dtype(group.dtype)
        lacking = emit.state(group, "lacking", layout=layout, dtype=wide, of_parameters=True)
        updated = emit.update(emit.emit(TakeExact(), group, [shard, lacking]), group)
        if exactly:
            received = emit.wait(emit.all_gather(updated))
            emit.emit(AddDifferences(None), group, [received, lacking])
            return
        quantizer = Quantizer(options.bits, options.block, rotated=options.rotated)
        coded = emit.emit(EncodeDifferences(quantizer), group, [emit.as_sent(updated), lacking])
        emit.emit(AddDifferences(quantizer), group, [emit.wait(emit.all_gather(coded)), lacking])
