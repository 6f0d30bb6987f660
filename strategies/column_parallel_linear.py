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

from autopar.errors import PlanError
from autopar.ir.primitives import DTYPE_BYTES
from autopar.strategies.base import Context, Group, Member, Options, Strategy, WireDtype
from autopar.strategies.emitter import Emitter
from autopar.strategies.row_exchange import row_shares


class ColumnParallelLinearOptions(Options):
    wire: WireDtype = "same"
    """Number format of what the layer is given, its outputs, and their gradients on the wire; anything but `same`
    rounds them, which the plan must allow."""


class ColumnParallelLinear(Strategy):
    name = "column_parallel_linear"
    summary = "each rank keeps some of a layer's outputs, and computes them for all ranks' samples"
    options_type = ColumnParallelLinearOptions
    spreads = True

    def applies(self, member: Member, context: Context) -> str | None:
        if context.keeps_rows_together is not None:
            return context.keeps_rows_together
        if member.parameter.layer is None:
            return "it is not the weight of a linear layer, or something else reads it as well"
        return None if member.slice.whole else "a layer's outputs are shared out, not slices of it"

    def options(self, context: Context) -> Sequence[ColumnParallelLinearOptions]:
        return [ColumnParallelLinearOptions(wire=w) for w in ("same", "bfloat16", "float16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, ColumnParallelLinearOptions)
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        if len(group.members) > 1:
            raise PlanError(f"group {group.index}: {self.name} synchronizes one weight, not {len(group.members)}")
        _exchange(group, options.wire, emit)


def _exchange(group: Group, wire: WireDtype, emit: Emitter) -> None:
    layer, n = group.members[0].parameter.layer, emit.world_size
    assert layer is not None
    sent_as = group.dtype if wire == "same" else wire
    width = DTYPE_BYTES[group.dtype]
    samples = layer.samples
    outputs = -(-layer.outputs // n)
    """Of a rank, at most."""
    product = 2 * n * samples * layer.width * outputs
    weight_bytes = outputs * layer.width * width
    given_bytes, error_bytes = n * samples * layer.width * width, n * samples * outputs * width
    begin, turn = layer.product_position - 1, layer.turn

    counts = emit.local("layer.count", group, elements=n, dtype="int64", splits=(1,) * n, position=-1)
    counts = emit.wait(emit.all_gather(counts), begin)
    one = samples * layer.width
    given = emit.local(
        "layer.given", group, [counts], elements=n * one, dtype=sent_as, splits=(one,) * n, position=begin
    )
    given = emit.wait(emit.all_gather(given), begin)
    one = n * samples * outputs
    found = emit.local(
        "layer.found",
        group,
        [given, counts],
        elements=n * one,
        dtype=sent_as,
        splits=(one,) * n,
        position=begin,
        flops=product,
        moved_bytes=weight_bytes + given_bytes + error_bytes,
    )
    found = emit.wait(emit.all_to_all(found), begin)
    emit.local(
        "layer.product",
        group,
        [found],
        elements=samples * layer.outputs,
        dtype=group.dtype,
        position=layer.product_position,
        moved_bytes=2 * error_bytes,
    )

    errors = emit.local(
        "layer.errors",
        group,
        [counts],
        elements=n * one,
        dtype=sent_as,
        splits=(one,) * n,
        position=turn,
        moved_bytes=2 * error_bytes,
    )
    errors = emit.wait(emit.all_to_all(errors), turn)
    if layer.given_gradient is not None:
        one = samples * layer.width
        returned = emit.local(
            "layer.returned",
            group,
            [errors, counts],
            elements=n * one,
            dtype=sent_as,
            sums=emit.own,
            position=turn,
            flops=product,
            moved_bytes=weight_bytes + given_bytes + error_bytes,
        )
        returned = emit.wait(emit.reduce_scatter(returned, (one,) * n), turn)
        emit.local(
            "layer.hand_back",
            group,
            [returned],
            elements=samples * layer.width,
            dtype=group.dtype,
            position=turn,
        )
    gradient = emit.local(
        "layer.gradient",
        group,
        [errors, given, counts],
        elements=group.elements,
        dtype=group.dtype,
        splits=row_shares(group, n),
        sums=emit.everyone,
        ragged=False,
        in_pieces=not emit.context.clips,
        position=emit.end,  # nobody waits for it, and it hides what is being sent
        flops=product,
        moved_bytes=weight_bytes + given_bytes + error_bytes,
    )
    emit.update(gradient, group, resident=True)
