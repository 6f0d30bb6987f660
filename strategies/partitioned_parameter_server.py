"""Partitioned parameter server: every rank owns a slice of the bucket, updates it, and sends it to all.

A reduce-scatter, the update of the shard, an all-gather. With equal shares this is ZeRO stage 1 in its bytes
(Rajbhandari et al., SC 2020) and the same 2 (n-1)/n of the bucket as an all-reduce, with 1/n of the optimizer's
work and state. Shares may be unequal, for ranks with unequal links.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Annotated

from pydantic import Field

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.shares import split_by_share
from autopar.strategies.base import Options, Shares, Strategy
from autopar.strategies.emitter import Emitter

EARLY = (0.0, 0.25, 0.5, 0.75)
"""How early slices may be sent back, of what is worth pricing."""


class PartitionedParameterServerOptions(Options):
    shares: Shares = ()
    """How much of the bucket each rank owns, in any unit; empty for equal shares. 0 means that a rank owns nothing."""
    wire: WireDtype = "same"
    """Number format of the gradients on the wire; parameters come back in their own."""
    late: bool = False
    """Whether parameters may come back in the next step, beside its forward pass."""
    early: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How early slices are updated and sent back: 0, behind the backward pass; 0.5, when half of what of it lies behind
    the group's gradients has gone by; 1, as soon as they are summed. Where gradients are clipped, there is no
    difference."""


class PartitionedParameterServer(Strategy):
    name = "partitioned_parameter_server"
    summary = "reduce-scatter; every rank updates its slice; all-gather the parameters"
    options_type = PartitionedParameterServerOptions

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "each rank updates a slice, so the program needs the optimizer"
        if not context.elementwise_update:
            return "the optimizer's update is not elementwise, so it cannot run on slices"
        if not member.contiguous:
            return "slices along another dimension than 0 do not lie together in memory"
        return None

    def options(self, context: Context) -> Sequence[PartitionedParameterServerOptions]:
        late = (False, True) if context.late_parameters else (False,)
        early = (0.0,) if context.clips else EARLY
        shares = ((), balanced_shares(context.rates)) if context.rates else ((),)
        each = product(early, late, shares)
        return [PartitionedParameterServerOptions(shares=s, late=x, early=e) for e, x, s in each]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, PartitionedParameterServerOptions)
        shares = options.shares or (1.0,) * emit.world_size
        by = _turn(group, options.early, emit.end) if options.early and not emit.context.clips else None
        gradients = emit.pack(group, options.wire)
        shard = emit.wait(emit.reduce_scatter(gradients, split_by_share(group.elements, shares)), by=by)
        emit.store(emit.all_gather(emit.update(shard, group)), group, deferred=options.late)


def _turn(group: Group, early: float, end: int) -> int:
    """Position in the backward pass at which a group's sums are waited for: nothing reads the parameters any more."""
    return max(round(end - early * (end - group.ready)), group.last_use)


def balanced_shares(rates: Sequence[float]) -> tuple[float, ...]:
    """How much each rank shall own, of 1 in all, so that the slowest is done as early as can be.

    A rank that owns s of S bytes sends, and receives, (1 - s) S for its gradients or of the others' parameters, and
    (n-1) s S for its own: together (1 + (n-2) s) S, over its own rate. Every rank has at least S to send; a slow one
    then owns nothing, and those that do own something are done at the same time.
    """
    n = len(rates)
    if n <= 2:
        return tuple(round(r / sum(rates), 4) for r in rates)
    owners = sorted(range(n), key=rates.__getitem__, reverse=True)
    while True:
        # (1 + (n-2) s_r) / rate_r = done, over all owners: their shares add up to 1.
        done = (n - 2 + len(owners)) / sum(rates[r] for r in owners)
        if done * rates[owners[-1]] >= 1:
            break
        owners.pop()
    return tuple(round((done * rates[r] - 1) / (n - 2), 4) if r in owners else 0.0 for r in range(n))
