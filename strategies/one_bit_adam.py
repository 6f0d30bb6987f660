"""1-bit Adam: after exact steps Adam's variance is frozen, and ranks send the signs of its momentum.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021, arXiv
2102.02888, Algorithm 1. Error feedback needs an optimizer that is linear in the gradient, which Adam's variance is not;
once that no longer changes, Adam is SGD with momentum and a rate for each element. So the first steps, up to the plan's
`from_step`, are exact Adam, and then:

1. Each rank adds its gradient to the momentum that all have, m_r = beta1 m + (1 - beta1) g_r, and its own residual, and
   sends the sign of each element with the mean magnitude of each block; it keeps what this loses.
2. Ranks share out what they add up, and send their parts of the sum in the same way, with a residual of their own
   (`autopar.strategies.quantized_exchange`).
3. The sum is the momentum of all ranks, m; x = x - lr m / (1 - beta1^t) / (sqrt(v) + eps), with the frozen variance v
   as Adam last divided by it, corrected for the zeros that it began with. The paper has neither correction.

A sign cannot say zero. Elements of which the variance is zero have never had a gradient: they are left out, and stay as
they are (the paper's authors ask their users for such a mask). What they get later stays in the residual, which is
said once. On one rank, the variance is frozen and nothing is lost.

Parameters in 16 bits are refused. Adam's correction for the zeros that its variance began with soon grows by less than
a thousandth a step; a variance in 16 bits, which has to grow with it, would be rounded back, and steps would grow.

Each rank sends about a thirty-second of the bytes of an all-reduce in 32 bits, as `scaled_sign` does, and computes some
twenty passes more than that. It wins where a network is slow beside the processor, under Adam, where `scaled_sign`
itself feeds the variance with what it has lost. The variance must have settled: the paper takes 15 to 20 % of steps,
and looks whether it still changes over 1 / (1 - beta2) of them, so that fewer say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import wide_dtype
from autopar.ops.context import Context
from autopar.ops.frozen_adam import FrozenUpdate, GrowMomentum, TakeMomentum, WithoutVariance
from autopar.ops.group import Group, Member
from autopar.ops.quantizers import Quantizer
from autopar.strategies.base import Options
from autopar.strategies.compressed import Compressed
from autopar.strategies.emitter import Emitter
from autopar.strategies.quantized_exchange import quantized_sum
from autopar.strategies.scaled_sign import ScaledSignOptions

WARM_UP = 0.2
"""Part of a training's steps that is exact, the most that the paper takes."""
MOST = 0.5
"""Where more would have to be exact for the variance to have settled, the training is too short."""


class OneBitAdamOptions(ScaledSignOptions):
    """Those of `scaled_sign`."""


class OneBitAdam(Compressed):
    name = "one_bit_adam"
    summary = "behind exact steps, freeze Adam's variance and send the signs of its momentum (1-bit Adam)"
    options_type = OneBitAdamOptions
    first_step = 1

    def applies(self, member: Member, context: Context) -> str | None:
        if context.has_optimizer and context.plain_adam is False:
            return (
                "it freezes Adam's variance, so the optimizer must be torch.optim.Adam or AdamW with amsgrad=False and "
                "differentiable=False: pass one of them, or use scaled_sign, which takes any optimizer"
            )
        if member.parameter.spec.dtype in ("bfloat16", "float16"):
            return (
                "Adam's variance is in 16 bits, as its parameter is, and cannot hold what a frozen one changes in a "
                "step: keep the parameter in float32, as under torch.autocast, or use scaled_sign"
            )
        return super().applies(member, context)

    def exact_steps(self, options: Options, steps: int, context: Context) -> int | None:
        exact = max(int(WARM_UP * steps), context.variance_steps, self.first_step)
        return exact if exact <= MOST * steps else None

    def options(self, context: Context) -> Sequence[OneBitAdamOptions]:
        return [OneBitAdamOptions(exchange="gather" if context.world_size == 2 else "parts")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, OneBitAdamOptions)
        gradients, without = emit.pack(group), emit.emit(WithoutVariance(), group)
        wide, sends = wide_dtype(group.dtype), emit.world_size > 1 and group.elements > 0
        kept = [] if sends else [emit.state(group, "residual", dtype=wide)]
        summed = emit.emit(GrowMomentum(wide), group, [gradients, without, *kept])
        if sends:
            quantizer = Quantizer(1, options.block, scale="mean")
            summed = quantized_sum(summed, quantizer, options.exchange == "parts", emit, left_out=without)
        else:
            summed = emit.wait(emit.all_reduce(summed))
        momentum = emit.emit(TakeMomentum(), group, [summed, without])
        emit.update(momentum, group, op=FrozenUpdate())
