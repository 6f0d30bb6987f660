"""Subgroups of ranks, among which a collective is done."""

from __future__ import annotations

Subgroups = tuple[tuple[int, ...], ...]
"""Disjoint sets of ranks that together are all ranks, each of which does a collective among itself; empty for one set
of all."""


def all_subgroups(subgroups: Subgroups, world_size: int) -> Subgroups:
    """The same, with the one set of all ranks where none are named."""
    return subgroups or (tuple(range(world_size)),)


def subgroup_of(rank: int, subgroups: Subgroups, world_size: int) -> tuple[int, ...]:
    """The ranks among which `rank` does a collective, itself included."""
    return next(s for s in all_subgroups(subgroups, world_size) if rank in s)
