"""Scaled signs: a bit for each number and the mean magnitude of each block; what is lost goes into the next step.

Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019). A thirty-second of the bytes of an all-reduce in 32
bits, and 6 % for scales of blocks of 512. It loses most of what it is given in a step, and lives on what it keeps;
under Adam, whose second moment is not linear in the gradient, error feedback is no free gift (DeepSpeed's 1-bit Adam,
2020).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autopar.ops.context import Context
from autopar.ops.quantizers import Quantizer
from autopar.strategies.base import Options
from autopar.strategies.quantized_exchange import Exchange, QuantizedExchange


class ScaledSignOptions(Options):
    block: int = Field(default=512, ge=8, le=1 << 20, multiple_of=8)
    """Numbers that share a scale."""
    exchange: Exchange = "parts"
    """`parts`: ranks share out what they add up, and round twice; `gather`: every rank adds up all messages."""


class ScaledSign(QuantizedExchange):
    name = "scaled_sign"
    summary = "send the signs of gradients and a scale a block; what is lost goes into the next step"
    options_type = ScaledSignOptions

    def options(self, context: Context) -> Sequence[ScaledSignOptions]:
        return [ScaledSignOptions(exchange="gather" if context.world_size == 2 else "parts")]

    def quantizer(self, options: Options) -> Quantizer:
        assert isinstance(options, ScaledSignOptions)
        return Quantizer(1, options.block, scale="mean")

    def exchange(self, options: Options) -> Exchange:
        assert isinstance(options, ScaledSignOptions)
        return options.exchange
