"""Column-parallel linear layer: ranks share a layer's outputs out, and each computes its own for all ranks' samples.

What travels is what the layer is given, its outputs, and the gradients of both: 2 (n-1) t (d + o/n) elements for t
samples of width d and o outputs, where an all-reduce of the weight's gradient sends 2 (n-1)/n d o. It is sent while
somebody waits for it, but weight, gradient, optimizer state, and the work on them take 1/n: for layers whose weight is
read, multiplied, and updated for few samples, that is most of their time. Krizhevsky, "One weird trick for
parallelizing convolutional neural networks", 2014; with its output gathered, Megatron-LM's `ColumnParallelLinear`
(Shoeybi et al., 2019), for samples that differ from rank to rank.

Rank r has outputs r, r+n, r+2n, ... A bias stays with the layer's own rank, which adds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.linear_layers import (
    LayerCount,
    LayerErrors,
    LayerGiven,
    LayerGradient,
    LayerHandBack,
    LayerOutputs,
    LayerProduct,
    LayerReturned,
)
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter


class ColumnParallelLinearOptions(Options):
    wire: WireDtype = "same"
    """Number format of what the layer is given, its outputs, and their gradients on the wire; anything but `same`
    rounds them, which the plan must allow."""


class ColumnParallelLinear(Strategy):
    name = "column_parallel_linear"
    summary = "each rank keeps some of a layer's outputs, and computes them for all ranks' samples"
    options_type = ColumnParallelLinearOptions
    spreads = True
    rounds_forward = True

    def applies(self, member: Member, context: Context) -> str | None:
        if context.keeps_rows_together is not None:
            return context.keeps_rows_together
        if member.parameter.layer is None:
            return "it is not the weight of a linear layer, or something else reads it as well"
        return None if member.slice.whole else "a layer's outputs are shared out, not slices of it"

    def layer(self, member: Member) -> frozenset[str] | None:
        return frozenset({member.slice.name})

    def options(self, context: Context) -> Sequence[ColumnParallelLinearOptions]:
        return [ColumnParallelLinearOptions(wire=w) for w in ("same", "bfloat16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, ColumnParallelLinearOptions)
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        _exchange(group, options.wire, emit)


def _exchange(group: Group, wire: WireDtype, emit: Emitter) -> None:
    layer, n = group.members[0].parameter.layer, emit.world_size
    assert layer is not None
    sent_as = group.dtype if wire == "same" else wire
    counts = emit.wait(emit.all_gather(emit.emit(LayerCount(layer), group)))
    given = emit.wait(emit.all_gather(emit.emit(LayerGiven(layer, sent_as), group, [counts])))
    outputs = emit.wait(emit.all_to_all(emit.emit(LayerOutputs(layer, sent_as), group, [given, counts])))
    emit.emit(LayerProduct(layer), group, [outputs])

    errors = emit.wait(emit.all_to_all(emit.emit(LayerErrors(layer, sent_as), group, [counts])))
    if layer.given_gradient is not None:
        returned = emit.emit(LayerReturned(layer, sent_as), group, [errors, counts])
        returned = emit.wait(emit.reduce_scatter(returned, (layer.samples * layer.width,) * n))
        emit.emit(LayerHandBack(layer), group, [returned])
    # Nobody waits for it, and it hides what is being sent.
    gradient = LayerGradient(layer, in_pieces=not emit.context.clips)
    emit.update(emit.emit(gradient, group, [errors, given, counts], by=emit.end), group, keeps_shards=True)
