"""DiLoCo: each rank trains alone for some steps, and an outer optimizer descends along the mean of what they moved.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv 2311.08105,
Algorithm 1. All ranks begin with the same parameters, x, and update replicas with their own gradients, by the user's
optimizer. In every k-th step, `every` of the plan's groups, behind that step's update:

1. g = x - mean over ranks of the replicas: what ranks have moved points downhill, so its opposite is the gradient.
2. m = c m + g; x = x - lr (g + c m): `torch.optim.SGD` with Nesterov momentum, the same on all ranks.
3. All ranks go on from x.

With `outer_lr=1` and `outer_momentum=0`, x is the mean of the replicas: LocalSGD, which any strategy that updates whole
replicas does under `every=k`. x and m are kept in float32, or float64 as the parameters; each rank's optimizer keeps
its own state. The difference of each rank is sent, which is much smaller than its parameters, so that `wire` may narrow
it: what a rank's own rounding loses is added to its next difference. In 8 or 4 bits, it goes through a quantizer with a
scale for each block (Streaming DiLoCo, arXiv 2501.18512, sends 4 bits), as `quantized` sends gradients.

Each rank sends 2 (n-1)/n w E / k bytes a step, in the mean, of E elements of w bytes: 1/k of an all-reduce. It wins
where a network is slow for an all-reduce in each step, at periods at which LocalSGD is worse than DiLoCo (some tens of
steps, or hundreds): it is another algorithm, of which the same learning rate may not be the best. With k=1 the outer
optimizer steps in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autopar.ir.dtypes import wide_dtype
from autopar.ops.averages import StoreAverage
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.layouts import REPLICATE
from autopar.ops.outer import KeepParameters, OuterStep
from autopar.spec.plan import Fidelity
from autopar.strategies.base import HELD, Options, Strategy
from autopar.strategies.emitter import Emitter
from autopar.strategies.moved import OUTER, MovedWire, mean_moved
from autopar.strategies.quantized_exchange import Block


class DiLoCoOptions(Options):
    outer_lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Coefficient of the outer optimizer's Nesterov momentum, from 0 to below 1; with 0, none is kept."""
    wire: MovedWire = "same"
    """Number format of the differences on the wire; `int8` and `int4` are whole numbers, times a scale for each block.
    What a rank loses by a narrower one than is kept joins its next difference."""
    block: Block = 256
    """Numbers that share a scale, of `int8` and `int4`: 16, 64, 256, 1024 or 4096."""


class DiLoCo(Strategy):
    name = "diloco"
    summary = "train replicas apart for some steps, and step with what they moved, by an outer optimizer"
    options_type = DiLoCoOptions
    trains_apart = True

    def fidelity(self, options: Options) -> Fidelity:
        return "local"

    def moves_frozen(self, options: Options) -> bool:
        return True  # by the outer momentum

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "each rank runs the optimizer alone, so the program needs it"
        return "its numbers are complex" if member.parameter.spec.dtype.startswith("complex") else None

    def options(self, context: Context) -> Sequence[DiLoCoOptions]:
        return [DiLoCoOptions(), DiLoCoOptions(wire="bfloat16"), DiLoCoOptions(wire="int8"), DiLoCoOptions(wire="int4")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, DiLoCoOptions)
        moment, wide = group.moment, wide_dtype(group.dtype)
        if moment.doing == "alone" and not moment.begins:
            self._update(group, emit)
            return
        anchor = emit.state(group, f"{HELD}anchor", layout=REPLICATE, dtype=wide)
        if moment.begins:
            anchor = emit.emit(KeepParameters(), group, [anchor])
        updated = self._update(group, emit)
        if moment.doing == "alone":
            return
        summed = mean_moved(anchor, updated, options.wire, options.block, emit)
        inputs = [anchor, summed]
        if options.outer_momentum:
            inputs.append(emit.state(group, f"{OUTER}momentum", layout=REPLICATE, dtype=wide))
        stepped = emit.emit(OuterStep(options.outer_lr, options.outer_momentum), group, inputs)
        emit.emit(StoreAverage(), group, [stepped])

    def _update(self, group: Group, emit: Emitter) -> Call:
        """By this rank's own gradients."""
        return emit.update(emit.pack(group), group) if emit.world_size == 1 else emit.update_alone(group)
