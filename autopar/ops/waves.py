"""Which lookups of a group's tables one exchange of rows serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.training_graph import Lookup, Table


@dataclass(frozen=True)
class Wave:
    """Lookups that one exchange serves: all their indices are known before the first of them runs."""

    entries: tuple[tuple[int, Lookup], ...]
    """Index of the table among the group's members, and the lookup."""
    known: int
    """Position behind which all indices are known."""
    needed: int
    """Position behind which the first lookup follows."""
    turn: int | None
    """Position behind which the gradients of all rows are there; `None` where none gets any."""


def waves_of(tables: Sequence[Table | None]) -> tuple[Wave, ...]:
    """The lookups of a group's members, in as few exchanges as their indices allow. `tables`: of each, how it is read;
    `None` for one that is no table."""
    found = [(i, k) for i, table in enumerate(tables) if table is not None for k in table.lookups]
    cut: list[list[tuple[int, Lookup]]] = []
    for i, lookup in sorted(found, key=lambda one: one[1].position):
        if any(j == i and k.indices == lookup.indices for wave in cut for j, k in wave):
            continue
        if not cut or lookup.known >= cut[-1][0][1].position:
            cut.append([])
        cut[-1].append((i, lookup))
    return tuple(
        Wave(tuple(w), max(k.known for _, k in w), min(k.position for _, k in w) - 1, _turn(tables, w)) for w in cut
    )


def _turn(tables: Sequence[Table | None], entries: list[tuple[int, Lookup]]) -> int | None:
    positions = []
    for i, lookup in entries:
        table = tables[i]
        assert table is not None
        positions += [t.position for t in table.parts.terms if t.left == lookup.indices]
    return max(positions, default=None)
