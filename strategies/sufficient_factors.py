"""Sufficient factors: ranks exchange the two thin matrices whose product is a linear layer's gradient.

The gradient of an (a x b) weight is the product of the output's gradient and the input, t x a and t x b for t tokens.
Each rank sends (n-1) t (a + b) elements where an all-reduce sends 2 (n-1)/n a b, and forms the sum of all ranks'
products itself, as one product over all tokens: Xie et al., UAI 2016; Zhang et al., "Poseidon", ATC 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.strategies.base import Context, Group, Member, Options, Strategy, WireDtype
from autopar.strategies.emitter import Emitter


class SufficientFactorsOptions(Options):
    wire: WireDtype = "same"
    """Number format of the factors on the wire; anything but `same` rounds them, which the plan must allow."""


class SufficientFactors(Strategy):
    name = "sufficient_factors"
    summary = "exchange the factors of the gradient; every rank forms it and updates its replica"
    options_type = SufficientFactorsOptions

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "the program needs the optimizer"  # gradients that add up over several backward passes are dense
        if member.parameter.parts is None or member.parameter.parts.kind != "factors":
            return "its gradient is not a product of two matrices"
        return None if member.slice.whole else "the factors of a slice are not found by themselves"

    def options(self, context: Context) -> Sequence[SufficientFactorsOptions]:
        return [SufficientFactorsOptions(wire=w) for w in ("same", "bfloat16", "float16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, SufficientFactorsOptions)
        emit.update(emit.gathered(group, options.wire), group)
