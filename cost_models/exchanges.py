"""Which collectives the runtime makes of messages of its own, and the way that these take."""

from __future__ import annotations

from autopar.ir.primitives import DTYPE_BYTES, EXACT_BYTES, ROUNDS_BYTES, Kind, Primitive, alike, all_teams


def in_rounds(primitive: Primitive) -> bool:
    """Whether the runtime makes a collective of messages of its own; then those of a group follow one another."""
    part = max(primitive.splits, default=0) * DTYPE_BYTES[primitive.dtype]
    if primitive.kind is Kind.SERVED_SUM:
        return True
    return primitive.kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER) and part > ROUNDS_BYTES


def goes_around(primitive: Primitive, world_size: int) -> bool:
    """Whether messages of the runtime's own go around a ring, where they add up on their way; or from each to each."""
    exact = primitive.kind is Kind.ALL_GATHER or DTYPE_BYTES[primitive.dtype] >= EXACT_BYTES
    return exact and all(map(alike, parts(primitive, world_size)))


def parts(primitive: Primitive, world_size: int) -> list[list[int]]:
    """What each rank holds, by team."""
    teams = all_teams(primitive.teams, world_size) if primitive.splits else ()
    return [[primitive.splits[r] for r in team] for team in teams]
