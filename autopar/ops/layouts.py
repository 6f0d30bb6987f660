"""How a flat value lies on the ranks, in DTensor's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.ops.subgroups import Subgroups, all_subgroups

Elements = npt.NDArray[np.int64]
"""A number of elements for each rank, by rank."""
Summed = tuple[frozenset[int], ...]
"""By rank: the ranks over which the rank's value is summed up so far."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank has all elements, and the same."""


@dataclass(frozen=True, slots=True)
class Varying:
    """Every rank has a value of its own, which says nothing of the others'."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank r has `sizes[r]` elements, in the order of ranks, or of those of its subgroup; none is in two places."""

    sizes: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.sizes))

    def __hash__(self) -> int:  # once: there are as many sizes as ranks
        return self._hash


@dataclass(frozen=True, slots=True)
class Owned:
    """One rank has all elements, the others none."""

    rank: int


@dataclass(frozen=True, slots=True)
class Partial:
    """A value that is laid out as `of`, still to be added up: rank r's is the sum over the ranks `summed[r]`."""

    summed: Summed
    of: Replicate | Shard


Layout = Replicate | Varying | Shard | Owned | Partial
REPLICATE = Replicate()
VARYING = Varying()


@lru_cache(maxsize=64)
def own_parts(world_size: int) -> Partial:
    """The layout of a state of which each rank has its own part, and only the sum over ranks means something; on one
    rank, too, so that the sum goes over to other numbers of ranks."""
    return Partial(tuple(frozenset({r}) for r in range(world_size)), REPLICATE)


@lru_cache(maxsize=64)
def unsummed(world_size: int) -> Replicate | Partial:
    """The layout of gradients that are each rank's own; with one rank, these are the sum."""
    if world_size == 1:
        return REPLICATE
    return Partial(tuple(frozenset({r}) for r in range(world_size)), REPLICATE)


def summed(layout: Layout, subgroups: Subgroups, of: Replicate | Shard) -> Layout:
    """The layout behind a sum within subgroups that leaves values laid out as `of`: `Partial` until the sum is over all
    ranks. No rank may be counted twice."""
    assert isinstance(layout, Partial), f"a sum takes values that are still to be added up, not {layout}"
    return _summed(layout.summed, subgroups, of)


@lru_cache(maxsize=1 << 12)
def _summed(before: Summed, subgroups: Subgroups, of: Replicate | Shard) -> Layout:
    found = list(before)
    for subgroup in all_subgroups(subgroups, len(before)):
        joined = frozenset[int]().union(*(before[r] for r in subgroup))
        assert len(joined) == sum(len(before[r]) for r in subgroup), (
            f"a sum over ranks {subgroup} counts some of them twice"
        )
        for rank in subgroup:
            found[rank] = joined
    return of if all(len(ranks) == len(before) for ranks in found) else Partial(tuple(found), of)


def shard_sizes(layout: Layout) -> tuple[int, ...]:
    """Elements that each rank has of a sharded value, by rank; else empty."""
    if isinstance(layout, Partial):
        layout = layout.of
    return layout.sizes if isinstance(layout, Shard) else ()


def held_elements(layout: Layout, elements: int, rank: int) -> int:
    """How many of a value's `elements` elements `rank` has."""
    if sizes := shard_sizes(layout):
        return sizes[rank]
    return 0 if isinstance(layout, Owned) and rank != layout.rank else elements


def held_before(layout: Layout, elements: int, rank: int) -> int:
    """The index in the whole value of the first element that `rank` has."""
    return sum(held_elements(layout, elements, r) for r in range(rank)) if is_sharded(layout) else 0


def held_by_rank(layout: Layout, elements: int, world_size: int) -> Elements:
    """How many of a value's `elements` elements each rank has, by rank."""
    if sizes := shard_sizes(layout):
        return np.array(sizes, np.int64)
    if isinstance(layout, Owned):
        return np.where(np.arange(world_size) == layout.rank, elements, 0)
    return np.full(world_size, elements)


def is_sharded(layout: Layout) -> bool:
    """Whether no two ranks have the same element."""
    return bool(shard_sizes(layout)) or isinstance(layout, Owned)
