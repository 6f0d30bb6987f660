"""AutoDist's four parameter-server builders: they differ in what is sliced, and in who owns the pieces.

One group for each variable or slice, as AutoDist has it; `common.fuse` merges those that agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.training_graph import Parameter
from autopar.search.builders.common import (
    Loads,
    Piece,
    alone,
    group,
    issue_order,
    piece_bytes,
    slice_count,
    slices,
    smallest_divisor,
    smallest_non_divisor,
    whole,
)
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context


def owned(piece: Piece, owner: int) -> SyncGroup:
    """A piece alone in a group, with its owner."""
    return group("parameter_server", [piece], {"owner": owner})


def ps(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
    """`PS`: rank 0 owns everything."""
    if context.world_size == 1:
        return alone(parameters)
    return issue_order((owned(whole(p), 0) for p in parameters), parameters)


def ps_load_balancing(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
    """`PSLoadBalancing`: each parameter, in the model's order, goes to the rank that owns the fewest bytes so far."""
    if context.world_size == 1:
        return alone(parameters)
    return issue_order(load_balanced(parameters, context), parameters)


def load_balanced(parameters: Sequence[Parameter], context: Context) -> list[SyncGroup]:
    """Whole parameters, placed greedily by bytes, in the order given."""
    loads = Loads(context.world_size)
    return [owned(whole(p), loads.place(piece_bytes(whole(p)))[0]) for p in parameters]


def partitioned_ps(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
    """`PartitionedPS`: dimension 0 in its smallest divisor >= 2 slices, which go to the least loaded ranks."""
    return _partitioned(parameters, context, smallest_divisor)


def uneven_partitioned_ps(
    parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec
) -> tuple[SyncGroup, ...]:
    """`UnevenPartitionedPS`: as `PartitionedPS`, with the smallest number >= 2 that does *not* divide."""
    return _partitioned(parameters, context, smallest_non_divisor)


def _partitioned(
    parameters: Sequence[Parameter], context: Context, rule: Callable[[int], int]
) -> tuple[SyncGroup, ...]:
    if context.world_size == 1:
        return alone(parameters)
    loads = Loads(context.world_size)
    groups = []
    for parameter in parameters:
        count = slice_count(parameter, 0, rule, context)
        owners = loads.place(piece_bytes(whole(parameter)), count)
        groups += [owned(p, o) for p, o in zip(slices(parameter, count), owners, strict=True)]
    return issue_order(groups, parameters)
