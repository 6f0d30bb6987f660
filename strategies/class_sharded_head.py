"""Class-sharded head: ranks share the classes out, and each scores all ranks' samples for its own.

What travels is what the layer is given and its gradient, and three numbers a sample and rank, from which every rank
forms the softmax over all classes: about 2 (n-1) t d elements for t samples of width d, whatever the number of
classes c, where an all-reduce of the weight's gradient sends 2 (n-1)/n c d. Scores, gradient, optimizer state and the
weight itself take 1/n of the memory. Megatron-LM's vocabulary-parallel loss (Shoeybi et al., 2019), without its
tensor-parallel body; Partial FC without sampling (An et al., 2021).

Rank r has classes r, r+n, r+2n, ..., so that frequent ones, which often come first, are spread evenly. Where the weight
is tied to an embedding, the rows that a batch looks up are fetched from their owners.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import WireDtype
from autopar.ir.training_graph import Head
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.heads import (
    HeadCount,
    HeadErrors,
    HeadGradient,
    HeadHandBack,
    HeadLogSum,
    HeadLoss,
    HeadReturned,
    HeadSamples,
    HeadScores,
    HeadSeed,
    HeadSums,
)
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter
from autopar.strategies.row_exchange import RowExchange


class ClassShardedHeadOptions(Options):
    wire: WireDtype = "same"
    """Number format of what the layer is given and of its gradient on the wire; anything but `same` rounds them, which
    the plan must allow."""


class ClassShardedHead(Strategy):
    name = "class_sharded_head"
    summary = "each rank keeps some of the classes, and scores all ranks' samples for them"
    options_type = ClassShardedHeadOptions
    spreads = True
    rounds_forward = True

    def applies(self, member: Member, context: Context) -> str | None:
        if context.keeps_rows_together is not None:
            return context.keeps_rows_together
        if member.parameter.head is None:
            return "it does not belong to a linear layer that is followed by a cross-entropy, and by nothing else"
        if member.parameter.head.dtype in ("float16", "bfloat16"):
            return "its softmax is computed in 16 bits, too few for sums over ranks"
        return None if member.slice.whole else "the classes are shared out, not slices of the layer"

    def layer(self, member: Member) -> frozenset[str] | None:
        head = member.parameter.head
        return None if head is None else frozenset({head.weight, *([head.bias] if head.bias else [])})

    def options(self, context: Context) -> Sequence[ClassShardedHeadOptions]:
        return [ClassShardedHeadOptions(wire=w) for w in ("same", "bfloat16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, ClassShardedHeadOptions)
        head = group.members[0].parameter.head
        assert head is not None
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        table = RowExchange(group, options.wire, emit)
        table.look_up()
        of_head = _gradient(group, head, options.wire, emit, tied=bool(table.waves))
        emit.update(table.gradient(of_head) if table.waves else of_head, group, keeps_shards=True)


def _gradient(group: Group, head: Head, wire: WireDtype, emit: Emitter, tied: bool) -> Call:
    """From what this rank's layer is given, to the gradients of the classes that it keeps. `tied`: whether those of
    rows that were looked up are added to them."""
    n = emit.world_size
    sent_as = group.dtype if wire == "same" else wire
    counts = emit.wait(emit.all_gather(emit.emit(HeadCount(head), group)))
    given = emit.wait(emit.all_gather(emit.emit(HeadSamples(head, sent_as), group, [counts])))
    scores = emit.emit(HeadScores(head), group, [given, counts])
    sums = emit.wait(emit.all_gather(emit.emit(HeadSums(head), group, [scores])))
    emit.emit(HeadLoss(head), group, [scores, sums])
    if head.log_sum is not None:
        emit.emit(HeadLogSum(head), group, [scores, sums])

    # Also where nothing is handed back: seeds are sent from the graph's own memory, which it may use again.
    seeds = emit.wait(emit.all_gather(emit.emit(HeadSeed(head), group, [scores])), by=head.turn)
    errors = emit.emit(HeadErrors(head), group, [scores, sums, seeds])
    if head.hidden_gradient is not None:
        returned = emit.emit(HeadReturned(head, sent_as), group, [errors])
        returned = emit.wait(emit.reduce_scatter(returned, (head.samples * head.width,) * n))
        emit.emit(HeadHandBack(head), group, [returned])
    # Nobody waits for it, and it hides what is being sent.
    gradient = HeadGradient(head, in_pieces=not tied and not emit.context.clips)
    return emit.emit(gradient, group, [errors], by=emit.end)
