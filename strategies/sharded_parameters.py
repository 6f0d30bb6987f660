"""Sharded parameters: ranks share the rows of parameters out, and gather them for each pass that reads them.

Rank r has rows r, r+n, r+2n, ... of each parameter, its gradient and its optimizer state, between steps too. A group is
gathered before the forward pass first reads it, each parameter freed behind its last use there; gathered again for
the backward pass; and its gradients are summed to the owners, which update their rows. 3 (n-1)/n of the bucket for each
rank, where an all-reduce sends 2 (n-1)/n, for 1/n of the memory: ZeRO stage 3 (Rajbhandari et al., SC 2020), as FSDP
does it. With `keep` it is gathered once: stage 2 in what is sent, and in memory between the steps still stage 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.shards import OwnShards, PackRows, ShardGradient, WholeParameters
from autopar.ops.shares import row_shares
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter

PIECES = 4
"""In about so many, at most, a group that was gathered is freed."""


class ShardedParametersOptions(Options):
    keep: bool = False
    """Whether what the forward pass has gathered is kept for the backward pass."""
    wire: WireDtype = "same"
    """Number format of the gradients on the wire; parameters are gathered in their own."""


class ShardedParameters(Strategy):
    name = "sharded_parameters"
    summary = "each rank keeps some rows of the parameters; they are gathered for each pass, and gradients sent back"
    options_type = ShardedParametersOptions
    spreads = True

    def applies(self, member: Member, context: Context) -> str | None:
        if context.keeps_rows_together is not None:
            return context.keeps_rows_together
        if not member.parameter.spec.shape:
            return "it is a single number, which has no rows"
        if member.parameter.last_forward < 0:
            return "it is not known where the forward pass reads it"
        return None if member.slice.whole else "the rows are shared out, not slices of the parameter"

    def options(self, context: Context) -> Sequence[ShardedParametersOptions]:
        return [ShardedParametersOptions(), ShardedParametersOptions(keep=True)]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, ShardedParametersOptions)
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        parameters = [m.parameter for m in group.members]
        again = [p for p in parameters if p.first_backward >= 0]
        uses = [p.first_use for p in parameters]
        last = max(p.last_forward for p in parameters)
        returns = min((p.first_backward for p in again), default=-1)
        # What the backward pass wants back as soon as it would have been freed is kept.
        keep = options.keep or (returns >= 0 and returns - last <= _span(uses))
        reads = [p.last_use if keep else p.last_forward for p in parameters]
        _gather(group, False, uses, reads, emit)
        if again and not keep:
            _gather(group, True, [p.first_backward for p in again], [p.last_use for p in again], emit)
        self._reduce(group, options, emit)

    def _reduce(self, group: Group, options: ShardedParametersOptions, emit: Emitter) -> None:
        """The sums of gradients go to the owners of rows. They are waited for when as much of the backward pass has
        gone by again, so that no more than two groups' gradients are there at a time."""
        packed = emit.emit(PackRows(emit.sent_as(group, options.wire)), group)
        by = max(group.ready + _span([m.parameter.ready for m in group.members]), group.last_use)
        summed = emit.wait(emit.reduce_scatter(packed, row_shares(group, emit.world_size)), by=by)
        emit.update(emit.emit(ShardGradient(), group, [summed]), group, keeps_shards=True)


def _gather(group: Group, backward: bool, uses: Sequence[int], reads: Sequence[int], emit: Emitter) -> None:
    """Makes the members whole that a pass reads, from as long before their first use as these uses lie apart: then the
    group in front of it is computed, if they are of one size. Each is there until it is read last, `reads`; small ones
    are freed together."""
    own = emit.emit(OwnShards(backward), group, by=min(uses) - 1 - _span(uses))
    whole = emit.emit(WholeParameters(backward), group, [emit.wait(emit.all_gather(own))])
    some = WholeParameters(backward).some(group)
    elements = 0
    for i, (last, member) in enumerate(sorted(zip(reads, some.members, strict=True), key=lambda read: read[0]), 1):
        elements += member.elements
        if PIECES * elements >= some.elements or i == len(some.members):
            emit.free(whole, elements, last)
            elements = 0


def _span(positions: Sequence[int]) -> int:
    return max(1, max(positions) - min(positions))
