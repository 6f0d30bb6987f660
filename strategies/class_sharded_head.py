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

from autopar.errors import PlanError
from autopar.ir.primitives import DTYPE_BYTES
from autopar.ir.training_graph import Head
from autopar.strategies.base import Context, Group, Member, Options, Strategy, WireDtype
from autopar.strategies.emitter import Emitter, index_width
from autopar.strategies.row_exchange import RowExchange, row_shares
from autopar.strategies.value import Value


class ClassShardedHeadOptions(Options):
    wire: WireDtype = "same"
    """Number format of what the layer is given and of its gradient on the wire; anything but `same` rounds them, which
    the plan must allow."""


class ClassShardedHead(Strategy):
    name = "class_sharded_head"
    summary = "each rank keeps some of the classes, and scores all ranks' samples for them"
    options_type = ClassShardedHeadOptions
    spreads = True

    def applies(self, member: Member, context: Context) -> str | None:
        if context.keeps_rows_together is not None:
            return context.keeps_rows_together
        if member.parameter.head is None:
            return "it does not belong to a linear layer that is followed by a cross-entropy, and by nothing else"
        if member.parameter.head.dtype in ("float16", "bfloat16"):
            return "its softmax is computed in 16 bits, too few for sums over ranks"
        return None if member.slice.whole else "the classes are shared out, not slices of the layer"

    def options(self, context: Context) -> Sequence[ClassShardedHeadOptions]:
        return [ClassShardedHeadOptions(wire=w) for w in ("same", "bfloat16", "float16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, ClassShardedHeadOptions)
        head = group.members[0].parameter.head
        assert head is not None
        members, needed = {m.slice.name for m in group.members}, {head.weight, head.bias} - {None}
        if members != needed:
            raise PlanError(
                f"group {group.index}: a class-sharded head holds its layer's parameters, and no others: "
                f"{' and '.join(sorted(map(str, needed)))}, not {', '.join(sorted(members))}"
            )
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        table = RowExchange(group, options.wire, emit)
        table.look_up()
        of_head = _gradient(group, head, options.wire, emit, tied=bool(table.waves))
        emit.update(table.gradient(of_head) if table.waves else of_head, group, resident=True)


def _gradient(group: Group, head: Head, wire: WireDtype, emit: Emitter, tied: bool) -> Value:
    """From what this rank's layer is given, to the gradients of the classes that it keeps. `tied`: whether those of
    rows that were looked up are added to them."""
    n, samples, width = emit.world_size, head.samples, head.width
    sent_as = group.dtype if wire == "same" else wire
    scores = samples * head.classes  # n times the samples, a share of the classes
    score_bytes = scores * DTYPE_BYTES[head.dtype]
    product = 2 * scores * width
    weight_bytes = group.elements // n * DTYPE_BYTES[group.dtype]
    given_bytes = n * samples * width * DTYPE_BYTES[group.dtype]

    counts = emit.local("head.count", group, elements=n, dtype="int64", splits=(1,) * n, position=-1)
    counts = emit.wait(emit.all_gather(counts), head.begin)

    one = samples * (width + index_width(sent_as))
    one += one % 2
    given = emit.local(
        "head.samples", group, [counts], elements=n * one, dtype=sent_as, splits=(one,) * n, position=head.begin
    )
    given = emit.wait(emit.all_gather(given), head.begin)
    scored = emit.local(
        "head.scores",
        group,
        [given, counts],
        elements=scores,
        dtype=head.dtype,
        position=head.begin,
        flops=product,
        moved_bytes=weight_bytes + given_bytes + 3 * score_bytes,
    )
    sums = emit.local(
        "head.sums",
        group,
        [scored],
        elements=n * head.numbers * n * samples,
        dtype=head.dtype,
        splits=(head.numbers * n * samples,) * n,
        position=head.begin,
    )
    sums = emit.wait(emit.all_gather(sums), head.begin)
    emit.local("head.loss", group, [scored, sums], elements=1, dtype=head.dtype, position=head.begin)

    if head.log_sum is not None:
        emit.local("head.log_sum", group, [scored, sums], elements=samples, dtype=head.dtype, position=head.begin)

    one = 1 if head.log_sum is None else 1 + samples
    seeds = emit.local(
        "head.seed", group, [scored], elements=n * one, dtype=head.dtype, splits=(one,) * n, position=head.turn
    )
    seeds = emit.wait(emit.all_gather(seeds), head.turn)
    errors = emit.local(
        "head.errors",
        group,
        [scored, sums, seeds],
        elements=scores,
        dtype=group.dtype,
        position=head.turn,
        moved_bytes=2 * score_bytes,
        in_place=True,
    )
    if head.hidden_gradient is not None:
        returned = emit.local(
            "head.returned",
            group,
            [errors],
            elements=n * samples * width,
            dtype=sent_as,
            sums=emit.own,
            position=head.turn,
            flops=product,
            moved_bytes=weight_bytes + given_bytes + score_bytes,
        )
        returned = emit.wait(emit.reduce_scatter(returned, (samples * width,) * n), head.turn)
        emit.local("head.hand_back", group, [returned], elements=samples * width, dtype=group.dtype, position=head.turn)
    return emit.local(
        "head.gradient",
        group,
        [errors],
        elements=group.elements,
        dtype=group.dtype,
        splits=row_shares(group, n),
        sums=emit.everyone,
        ragged=False,
        in_pieces=not tied and not emit.context.clips,
        position=emit.end,  # nobody waits for it, and it hides what is being sent
        flops=product,
        moved_bytes=weight_bytes + given_bytes + score_bytes,
    )
