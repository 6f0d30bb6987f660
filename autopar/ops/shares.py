"""How elements are shared out among ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autopar.ops.group import Group


def row_shares(group: Group, world_size: int, besides: int = 0) -> tuple[int, ...]:
    """Elements of a group's parameters that each rank keeps, rank r rows r, r+n, r+2n, ..., and so many `besides`."""
    return _row_shares(tuple(m.shape for m in group.members), world_size, besides)


@lru_cache(maxsize=1 << 10)  # layers are alike, and plans of a search have most of their groups in common
def _row_shares(shapes: tuple[tuple[int, ...], ...], world_size: int, besides: int) -> tuple[int, ...]:
    found = np.full(world_size, besides, np.int64)
    for (rows, row_elements), members in Counter((shape[0], math.prod(shape[1:])) for shape in shapes).items():
        found += members * row_elements * ((rows - 1 - np.arange(world_size)) // world_size + 1)
    return tuple(found.tolist())


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
