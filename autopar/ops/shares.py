"""How elements are shared out among ranks."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ops.group import Group


def row_shares(group: Group, world_size: int) -> tuple[int, ...]:
    """Elements of a group's parameters that each rank keeps: rank r has rows r, r+n, r+2n, ..."""
    return tuple(
        sum(m.elements // max(1, m.shape[0]) * len(range(r, m.shape[0], world_size)) for m in group.members)
        for r in range(world_size)
    )


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
