"""QSGD: gradients in whole parts of their block's norm, rounded at random so that the mean is right; nothing is kept.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding" (NeurIPS 2017), with codes
of a fixed length in the place of Elias's. Its variance grows with the root of the block, so that error feedback makes
it diverge (GRACE, ICDCS 2021: 0.72 to 0.00 on a ResNet-50). For comparison: `quantized` sends as much, and loses less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from autopar.ops.context import Context
from autopar.ops.quantizers import Quantizer
from autopar.strategies.base import Options
from autopar.strategies.quantized_exchange import Exchange, QuantizedExchange


class QsgdOptions(Options):
    bits: Literal[2, 4, 8] = 8
    """Of each number on the wire; 1, 7 or 127 levels beside zero."""
    block: int = Field(default=512, ge=8, le=1 << 20, multiple_of=8)
    """Numbers that share a norm; QSGD's bucket."""
    exchange: Exchange = "gather"
    """`gather`: every rank adds up all messages, as in the paper; `parts`: ranks share out what they add up, and round
    twice."""


class Qsgd(QuantizedExchange):
    name = "qsgd"
    summary = "send gradients in few levels of their norm, rounded at random; nothing is kept"
    options_type = QsgdOptions

    def options(self, context: Context) -> Sequence[QsgdOptions]:
        return [QsgdOptions(bits=8), QsgdOptions(bits=4)]

    def quantizer(self, options: Options) -> Quantizer:
        assert isinstance(options, QsgdOptions)
        return Quantizer(options.bits, options.block, scale="norm", stochastic=True)

    def exchange(self, options: Options) -> Exchange:
        assert isinstance(options, QsgdOptions)
        return options.exchange
