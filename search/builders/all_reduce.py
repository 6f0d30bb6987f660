"""AutoDist's three all-reduce builders: groups of `CHUNK_SIZE` variables, or slices, in the model's order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.ir.training_graph import Parameter
from autopar.search.builders.common import (
    Piece,
    alone,
    group,
    issue_order,
    one_dtype_each,
    slice_count,
    slices,
    smallest_divisor,
    whole,
)
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context

CHUNK_SIZE = 128
"""Variables in a group: the default of AutoDist's builders (autodist/strategy/all_reduce_strategy.py)."""


def chunks(pieces: Sequence[Piece], chunk_size: int = CHUNK_SIZE) -> list[SyncGroup]:
    """Every `chunk_size` consecutive pieces in one all-reduce, dtypes apart."""
    return [
        group("all_reduce", part)
        for i in range(0, len(pieces), chunk_size)
        for part in one_dtype_each(pieces[i : i + chunk_size])
    ]


def all_reduce(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
    """`AllReduce`: whole parameters."""
    if context.world_size == 1:
        return alone(parameters)
    return issue_order(chunks([whole(p) for p in parameters]), parameters)


def partitioned_ar(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
    """`PartitionedAR`: dimension 0 in its smallest divisor >= 2 slices; the count of slices runs on over parameters."""
    if context.world_size == 1:
        return alone(parameters)
    pieces = [piece for p in parameters for piece in slices(p, slice_count(p, 0, smallest_divisor, context))]
    return issue_order(chunks(pieces), parameters)


def random_axis_partition_ar(
    parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec, seed: int = 0
) -> tuple[SyncGroup, ...]:
    """`RandomAxisPartitionAR`: as `PartitionedAR`, along a random dimension that is not 1 (0 for embedding rows)."""
    if context.world_size == 1:
        return alone(parameters)
    draw = random.Random(seed)
    pieces: list[Piece] = []
    for parameter in parameters:
        dims = [d for d, extent in enumerate(parameter.spec.shape) if extent > 1]
        if not dims:
            pieces.append(whole(parameter))
            continue
        dim = 0 if parameter.structure == "rows" else draw.choice(dims)
        pieces += slices(parameter, slice_count(parameter, dim, smallest_divisor, context), dim)
    return issue_order(chunks(pieces), parameters)
