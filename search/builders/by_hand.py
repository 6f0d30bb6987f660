"""What a person would write: DDP's buckets, other bucket sizes, and ZeRO stage 1."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from autopar.ir.training_graph import Parameter
from autopar.search.builders.common import (
    MIB,
    Builder,
    Piece,
    alone,
    applies,
    by_readiness,
    group,
    issue_order,
    others,
    piece_bytes,
    whole,
)
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context, strategy_named

DDP_FIRST_BUCKET_BYTES = 1 * MIB
DDP_BUCKET_BYTES = 25 * MIB
"""Defaults of `torch.nn.parallel.DistributedDataParallel` (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES,
bucket_cap_mb), after it has rebuilt its buckets in the order of gradients."""

SWEEP_MIB = (1, 4, 10, 25, 50, 100)


def buckets(
    parameters: Sequence[Parameter], bucket_bytes: int | None, first_bytes: int | None = None, apart: bool = False
) -> list[list[Piece]]:
    """Fills buckets in the order of gradients; one is closed when it reaches its size, as DDP does it. `None`: one
    bucket for each dtype. Dtypes have buckets of their own; so has, where they are to be `apart`, each branch."""
    closed: list[list[Piece]] = []
    opened: dict[Hashable, list[Piece]] = {}
    limit: dict[Hashable, int | None] = {}
    for parameter in by_readiness(parameters):
        kind = parameter.spec.dtype, parameter.branch if apart else None
        bucket = opened.setdefault(kind, [])
        bucket.append(whole(parameter))
        size = limit.setdefault(kind, first_bytes if first_bytes is not None else bucket_bytes)
        if size is not None and sum(map(piece_bytes, bucket)) >= size:
            closed.append(opened.pop(kind))
            limit[kind] = bucket_bytes
    return closed + list(opened.values())


def bucketed(
    strategy: str,
    bucket_bytes: int | None,
    first_bytes: int | None = None,
    option: str | None = None,
    apart: bool = False,
) -> Builder:
    """A builder that puts buckets of this size through one strategy, with the plainest of its options, or the plainest
    in which `option` is chosen; through all-reduces where that has none here. So does what some parameters are not fit
    for, as long as others are. `apart`: with buckets of its own for each branch of the model."""

    def build(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
        if context.world_size == 1:
            return alone(parameters)
        used, options = "all_reduce", {}
        offered = [o.model_dump(exclude_defaults=True) for o in strategy_named(strategy).options(context)]
        if offered:
            chosen = (o for o in offered if option in o)
            used, options = strategy, next(chosen, offered[0])
        fit = [p for p in parameters if applies(used, p, context)] or parameters
        cut = partial(buckets, bucket_bytes=bucket_bytes, first_bytes=first_bytes, apart=apart)
        groups = [group(used, pieces, options) for pieces in cut(fit)]
        groups += [group("all_reduce", pieces) for pieces in cut(others(parameters, fit))]
        return issue_order(groups, parameters)

    return build


ddp = bucketed("all_reduce", DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES)
zero1 = bucketed("partitioned_parameter_server", DDP_BUCKET_BYTES)
zero1_by_rate = bucketed("partitioned_parameter_server", 4 * MIB, option="shares")
"""Small buckets, so that parameters come back beside the gradients that are still to be sent."""
