"""DES-LOC: replicas are averaged, and the optimizer's moments of them more rarely, each on its own period.

Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models", ICLR 2026, arXiv
2505.22549. Each rank updates its own replica by Adam or its like. In every k-th step, `every` of the plan's groups,
behind that step's update, parameters are averaged over the ranks; in every `first_moment`-th of these synchronizations
the first moment (`exp_avg`), and in every `second_moment`-th the second one (`exp_avg_sq`), too. Moments forget slowly,
so their replicas differ little: the paper's 3 and 6 follow from how fast. LocalSGD, which any strategy does under
`every=k`, leaves them to their ranks for ever, for which nothing is guaranteed; with 1 and 1 this is Local Adam, which
sends three times as much.

All that is due in a step goes in one all-reduce. Each rank sends 2 (n-1)/n w E (1 + 1/f + 1/s) / k bytes a step, in the
mean, of E elements of w bytes, f and s being those periods: half as much again as LocalSGD. It wins where LocalSGD's
periods are long enough for moments to drift apart, which its loss shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.replicas import PackReplicas, StoreReplicas
from autopar.spec.plan import Fidelity
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam, AdamW, NAdam and RAdam call the first and the second moment."""


class DesLocOptions(Options):
    first_moment: int = Field(default=3, ge=1, le=10**6)
    """In every how many-th synchronization the first moment is averaged."""
    second_moment: int = Field(default=6, ge=1, le=10**6)
    """In every how many-th synchronization the second moment is averaged."""


class DesLoc(Strategy):
    name = "des_loc"
    summary = "average replicas from time to time, and the optimizer's moments more rarely (DES-LOC)"
    options_type = DesLocOptions
    trains_apart = True

    def fidelity(self, options: Options) -> Fidelity:
        return "local"

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "each rank runs the optimizer alone, so the program needs it"
        if context.keeps_moments is False:
            return (
                "it averages the optimizer's moments, so the optimizer must be one of torch's Adam, AdamW, NAdam and "
                "RAdam: pass one of them, or use all_reduce with every=K, which averages parameters alone"
            )
        return "its numbers are complex" if member.parameter.spec.dtype.startswith("complex") else None

    def options(self, context: Context) -> Sequence[DesLocOptions]:
        return [DesLocOptions(), DesLocOptions(first_moment=1, second_moment=1)]

    def also_every(self, options: Options) -> tuple[int, ...]:
        assert isinstance(options, DesLocOptions)
        return options.first_moment, options.second_moment

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        updated = emit.update_alone(group)
        if group.moment.doing == "alone":
            return
        due = tuple(key for bit, key in enumerate(MOMENTS) if group.moment.slot >> bit & 1)
        summed = emit.wait(emit.all_reduce(emit.emit(PackReplicas(due), group, [updated])))
        emit.emit(StoreReplicas(due), group, [summed])
