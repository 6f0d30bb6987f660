"""TernGrad: -1, 0 or 1 times the largest magnitude of a block, rounded at random; nothing is kept.

Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning" (NeurIPS 2017):
magnitudes are cut off at 2.5 root mean squares first, which makes it biased, and 0 leaves that out. Scales are of
blocks here, of layers there. For comparison: `quantized` in 4 bits sends twice as much, and loses far less.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autopar.ops.context import Context
from autopar.ops.quantizers import Quantizer
from autopar.strategies.base import Options
from autopar.strategies.quantized_exchange import Exchange, QuantizedExchange


class TernGradOptions(Options):
    block: int = Field(default=512, ge=8, le=1 << 20, multiple_of=8)
    """Numbers that share a scale."""
    clip: float = Field(default=2.5, ge=0)
    """Magnitudes are cut off at so many root mean squares of the block; 0 for not at all."""
    exchange: Exchange = "gather"
    """`gather`: every rank adds up all messages; `parts`: ranks share out what they add up, and round twice."""


class TernGrad(QuantizedExchange):
    name = "terngrad"
    summary = "send gradients as -1, 0 or 1 times a scale, rounded at random; nothing is kept"
    options_type = TernGradOptions

    def options(self, context: Context) -> Sequence[TernGradOptions]:
        return [TernGradOptions()]

    def quantizer(self, options: Options) -> Quantizer:
        assert isinstance(options, TernGradOptions)
        return Quantizer(2, options.block, stochastic=True, clip=options.clip)

    def exchange(self, options: Options) -> Exchange:
        assert isinstance(options, TernGradOptions)
        return options.exchange
