"""The mean of what replicas have moved since all ranks had the same parameters, in few bits where that is asked for."""

from __future__ import annotations

from typing import Literal

from autopar.ops.base import Call
from autopar.ops.outer import OuterGradient
from autopar.ops.quantizers import Quantizer
from autopar.strategies.emitter import Emitter
from autopar.strategies.quantized_exchange import quantized_sum

OUTER = "outer_"
"""What the names of its states begin with, which are in units of parameters."""
BITS: dict[str, Literal[4, 8]] = {"int8": 8, "int4": 4}
MovedWire = Literal["same", "bfloat16", "float16", "int8", "int4"]
"""Number formats in which differences of parameters are sent."""


def mean_moved(anchor: Call, updated: Call, wire: MovedWire, block: int, emit: Emitter) -> Call:
    """The anchor, what all replicas began with, less the mean of what they have come to, on all ranks. What a rank's
    own rounding loses is kept, and joins its next difference. `block`: numbers that share a scale, of whole numbers."""
    group, wide = anchor.owner_group, anchor.dtype
    if emit.world_size == 1:
        return emit.emit(OuterGradient(wide), group, [anchor, updated])
    if wire in BITS and group.elements:
        own = emit.emit(OuterGradient(wide), group, [anchor, updated])
        quantizer = Quantizer(BITS[wire], block)
        return quantized_sum(own, quantizer, emit.world_size > 2, emit, of=OUTER)
    sent = group.dtype if wire in ("same", *BITS) else wire
    residual = [emit.state(group, f"{OUTER}residual", dtype=wide)] if sent != wide else []
    own = emit.emit(OuterGradient(sent), group, [anchor, updated, *residual])
    return emit.wait(emit.all_reduce(own))
