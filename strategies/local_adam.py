"""Local Adam: replicas are averaged from time to time, and each rank's Adam takes steps as long as all together would.

Under LocalSGD, which any strategy does with `every=k`, each rank's Adam divides by the root of its own gradient's
second moment. Of n ranks, noise makes that up to n times the one of the mean gradient, so that steps are up to sqrt(n)
times too short, whatever the period is: four ranks train as if at half of their learning rate. Here the second moment
takes only that part of each new square which the mean gradient's square is of the own one's, so that it is what exact
training would have (`autopar.ops.mean_variance`):

1. In every step each rank updates its replica by Adam, with its own gradient g; the second moment is
   v = beta2 v + (1 - beta2) f g^2. f is a number for each parameter, and 1 until ranks have synchronized.
2. In every k-th step, `every` of the plan's groups, parameters are averaged behind that step's update; and from the
   next step on, f = |mean of g|^2 / mean of |g|^2 over the ranks, from 1/4n to 1, of that step's gradients; the norms
   are those of sketches of 128 numbers.

So exact steps before `from_step`, and a checkpoint's state under any other plan, have a second moment that fits. The
first moment is each rank's own.

With a narrower `wire`, what replicas have moved since the last synchronization is sent in 16, 8 or 4 bits, as `diloco`
sends it, and what a rank's own rounding loses joins its next difference.

Each rank sends 2 (n-1)/n (w E + 129 v P) / k bytes a step, in the mean, of E elements of w bytes on the wire, and v in
memory, in P parameters: what LocalSGD sends, but for the sketches. It wins where LocalSGD would, under Adam or AdamW.
What remains of the loss is that replicas drift apart, which grows with the period.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import wide_dtype
from autopar.ops.averages import PackParameters, StoreAverage
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.layouts import REPLICATE
from autopar.ops.mean_variance import SketchGradients, TakeCommonParts, UpdateOfMean, gradients_of
from autopar.ops.outer import KeepParameters, OuterStep
from autopar.spec.plan import Fidelity
from autopar.strategies.base import HELD, Options, Strategy
from autopar.strategies.emitter import Emitter
from autopar.strategies.moved import MovedWire, mean_moved
from autopar.strategies.quantized_exchange import Block

WARM_UP = 0.05
"""Part of a training's steps that is exact before: while the learning rate rises, gradients change too fast for one
synchronization to say what the next steps' common part is. [Empirical: on ten tasks of benchmarks/budget, whose rates
rise for a twentieth of the steps, as much is as good as a tenth, and less is worse]"""
LOOKED_UP = 50
"""How often a rank must look up a row of a table, in the mean, in the 1 / (1 - beta2) steps that the second moment is
an average over. The newest square counts n times as much as that of exact training, which looks rows up n times as
often; at 50, that is a fiftieth of the moment, and steps are 1 % shorter for it, and for rarer rows much more."""


class LocalAdamOptions(Options):
    wire: MovedWire = "same"
    """Number format of what is averaged, on the wire: parameters as they are, or what they have moved, in a narrower
    one; `int8` and `int4` are whole numbers, times a scale for each block."""
    block: Block = 256
    """Numbers that share a scale, of `int8` and `int4`: 16, 64, 256, 1024 or 4096."""


class LocalAdam(Strategy):
    name = "local_adam"
    summary = "average replicas from time to time, whose Adam takes steps as long as with the mean gradient"
    options_type = LocalAdamOptions
    trains_apart = True
    only_own_period = True  # what is averaged instead has the steps that are too short

    def fidelity(self, options: Options) -> Fidelity:
        return "local"

    def moves_frozen(self, options: Options) -> bool:
        assert isinstance(options, LocalAdamOptions)
        return options.wire != "same"  # by what was not sent yet

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "each rank runs the optimizer alone, so the program needs it"
        if context.plain_adam is False:
            return (
                "it corrects Adam's second moment, so the optimizer must be torch.optim.Adam or AdamW with "
                "amsgrad=False and differentiable=False: pass one of them, or use all_reduce with every=K, which "
                "averages replicas under any optimizer"
            )
        dtype = member.parameter.spec.dtype
        if dtype in ("bfloat16", "float16"):
            return (
                "Adam's second moment is in 16 bits, as its parameter is, and cannot hold a part of what a step adds: "
                "keep the parameter in float32, as under torch.autocast, or use all_reduce with every=K"
            )
        if dtype.startswith("complex"):
            return "its numbers are complex"
        parts = member.parameter.parts
        if parts is None or parts.kind != "rows" or not context.variance_steps:
            return None
        often = member.parts.distinct / max(1, member.parameter.spec.shape[0]) * context.variance_steps
        if often >= LOOKED_UP:
            return None
        return (
            f"a row of it is looked up {often:.3g} times in the steps that Adam's second moment is an average over, "
            f"expected at least {LOOKED_UP}, so that its newest square alone makes steps too short: use sparse_rows"
        )

    def exact_steps(self, options: Options, steps: int, context: Context) -> int | None:
        return int(WARM_UP * steps)

    def options(self, context: Context) -> Sequence[LocalAdamOptions]:
        return [LocalAdamOptions(), LocalAdamOptions(wire="int8"), LocalAdamOptions(wire="int4")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, LocalAdamOptions)
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        count = gradients_of(group)
        if not count:
            emit.update_alone(group)
            return
        own, wide = emit.own_gradients(group), wide_dtype(group.dtype)
        common = emit.state(group, "common_part", layout=REPLICATE, elements=count, dtype=wide)
        anchor = None
        if options.wire != "same":
            anchor = emit.state(group, f"{HELD}anchor", layout=REPLICATE, dtype=wide)
            if group.moment.begins:
                anchor = emit.emit(KeepParameters(), group, [anchor])
        if group.moment.doing == "alone":
            emit.update_alone(group, own, common, op=UpdateOfMean())
            return
        summed = emit.all_reduce(emit.emit(SketchGradients(), group, [own]))
        updated = emit.update_alone(group, own, common, op=UpdateOfMean())
        if anchor is None:
            averaged = emit.wait(emit.all_reduce(emit.emit(PackParameters(), group, [updated])))
        else:
            moved = mean_moved(anchor, updated, options.wire, options.block, emit)
            averaged = emit.emit(OuterStep(1.0, 0.0), group, [anchor, moved])
        emit.emit(StoreAverage(), group, [averaged])
        emit.emit(TakeCommonParts(), group, [common, emit.wait(summed), updated])
