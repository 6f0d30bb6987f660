"""Deep Gradient Compression: top-k of what momentum has made of the gradients, accumulated on each rank.

Each rank keeps a momentum u and a sum v, and sends the chunks of v that are largest over all ranks, as `top_k` does:
u = m u + g, v = v + u (momentum correction), and both become zero where v was sent (momentum factor masking;
Lin et al., "Deep Gradient Compression", ICLR 2018). An optimizer's own momentum would go on with what was sent late, so
it must have none: `torch.optim.SGD` without momentum, and the coefficient here. On one rank, which sends nothing, this
is SGD with momentum, and so it is before the plan's `from_step`, the warm-up: all ranks' u are summed whole, and each
rank goes on from its own. Clipping is of the sum that is updated with, where the paper's is of each rank's gradients,
to the norm over sqrt(n).

With `ramp=k`, the density falls in k stages of `ramp_steps` steps, d^(1/(k+1)), d^(2/(k+1)), ..., and is d behind them:
for d = 0.001 and k = 4, 75, 93.75, 98.4, 99.6 and 99.9 % are not sent, the paper's exponential warm-up, a stage an
epoch. Each stage is a step of its own, priced and run as any.

It sends what `top_k` sends, computes one more pass, and keeps twice as much. It wins where `top_k` does, under SGD with
momentum, at densities so small that an element waits for as long as momentum lasts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autopar.ir.dtypes import wide_dtype
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.sparsification import Accumulate, Momentum
from autopar.ops.state import Recall
from autopar.strategies.base import Options
from autopar.strategies.chosen_chunks import ChunkOptions
from autopar.strategies.emitter import Emitter
from autopar.strategies.top_k import TopK


class DGCOptions(ChunkOptions):
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """The coefficient of momentum, as SGD's, from 0 to below 1."""
    ramp: int = Field(default=0, ge=0, le=16)
    """Stages behind the warm-up, in which fewer and fewer chunks are sent, by the same factor each time; 0 for none."""
    ramp_steps: int = Field(default=500, ge=1)
    """Steps of each stage."""


class DGC(TopK):
    name = "dgc"
    summary = "accumulate momentum on each rank, and sum its largest chunks over all ranks (Deep Gradient Compression)"
    options_type = DGCOptions
    warms_up = True

    def applies(self, member: Member, context: Context) -> str | None:
        if context.has_optimizer and context.plain_sgd is False:
            return (
                "it keeps the momentum itself, so the optimizer must be torch.optim.SGD without momentum: pass "
                "SGD(..., momentum=0), with a learning rate for SGD with momentum, and the coefficient as the option "
                "'momentum'; or use top_k, which takes any optimizer"
            )
        return super().applies(member, context)

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, DGCOptions)
        if emit.world_size == 1:
            momentum = self._momentum(group, options, emit)
            emit.update(emit.emit(Momentum(options.momentum), group, [momentum, emit.pack(group)]), group)
        elif group.moment.doing == "plain":
            momentum = self._momentum(group, options, emit)
            grown = emit.emit(Accumulate(options.momentum), group, [momentum, emit.pack(group)])
            emit.update(emit.wait(emit.all_reduce(emit.emit(Recall(group.dtype), group, [grown]))), group)
        else:
            super().lower(group, options, emit)

    def stages(self, options: Options) -> tuple[int, ...]:
        assert isinstance(options, DGCOptions)
        return (options.ramp_steps,) * options.ramp

    def density(self, options: ChunkOptions, stage: int) -> float:
        assert isinstance(options, DGCOptions)
        return float(options.density ** (1 - stage / (options.ramp + 1)))

    def states(self, group: Group, options: ChunkOptions, emit: Emitter) -> list[Call]:
        return [*super().states(group, options, emit), self._momentum(group, options, emit)]

    def accumulated(self, gradients: Call, kept: Sequence[Call], options: ChunkOptions, emit: Emitter) -> Call:
        assert isinstance(options, DGCOptions)
        residual, momentum = kept
        grown = emit.emit(Accumulate(options.momentum), gradients.owner_group, [momentum, gradients])
        return emit.emit(Accumulate(), gradients.owner_group, [residual, grown])

    def _momentum(self, group: Group, options: ChunkOptions, emit: Emitter) -> Call:
        assert isinstance(options, DGCOptions)
        return emit.state(group, "momentum", dtype=wide_dtype(group.dtype), momentum=options.momentum)
