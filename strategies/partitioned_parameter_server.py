"""Partitioned parameter server: every rank owns a slice of the bucket, updates it, and sends it to all.

A reduce-scatter, the update of the shard, an all-gather. With equal shares this is ZeRO stage 1 in its bytes
(Rajbhandari et al., SC 2020) and the same 2 (n-1)/n of the bucket as an all-reduce, with 1/n of the optimizer's
work and state. Shares may be unequal, for ranks with unequal links.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import field_validator

from autopar.strategies.base import Context, Group, Member, Options, Strategy, WireDtype
from autopar.strategies.emitter import Emitter


class PartitionedParameterServerOptions(Options):
    shares: tuple[float, ...] = ()
    """How much of the bucket each rank owns, in any unit; empty for equal shares. 0 means that a rank owns nothing."""
    wire: WireDtype = "same"
    """Number format of the gradients on the wire; parameters come back in their own."""
    late: bool = False
    """Whether parameters may come back in the next step, beside its forward pass."""

    @field_validator("shares")
    @classmethod
    def _positive(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        if shares and (min(shares) < 0 or sum(shares) <= 0):
            raise ValueError(f"shares must not be negative and must not all be 0, got {shares}")
        return shares


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
        return [PartitionedParameterServerOptions(late=x) for x in late]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, PartitionedParameterServerOptions)
        shares = options.shares or (1.0,) * emit.world_size
        gradients = emit.pack(group, options.wire)
        shard = emit.wait(emit.reduce_scatter(gradients, split_by_share(group.elements, shares)))
        parameters = emit.update(shard, group)
        emit.store(emit.all_gather(parameters), group, late=options.late)


def split_by_share(elements: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Cuts `elements` into consecutive parts in proportion to `shares`, to the nearest element."""
    total, done, parts = sum(shares), 0.0, []
    previous = 0
    for share in shares:
        done += share
        end = round(elements * done / total)
        parts.append(end - previous)
        previous = end
    return tuple(parts)
