"""How elements are shared out among ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from autopar.ops.group import Group


def row_shares(group: Group, world_size: int) -> tuple[int, ...]:
    """Elements of a group's parameters that each rank keeps: rank r has rows r, r+n, r+2n, ..."""
    found = np.zeros(world_size, np.int64)
    for (rows, row_elements), members in _row_sizes(group).items():
        found += members * row_elements * ((rows - 1 - np.arange(world_size)) // world_size + 1)
    return tuple(found.tolist())


def _row_sizes(group: Group) -> Counter[tuple[int, int]]:
    """How many members have so many rows of so many elements."""
    return Counter((shape[0], math.prod(shape[1:])) for shape in (m.shape for m in group.members))


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
