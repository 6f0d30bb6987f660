"""What strategies share whose tables live in rows on one rank each: the rows that a batch names are fetched from their
owners before the forward pass looks them up, and their gradients are sent back.

Every rank merges equal indices first, then asks each owner for the rows that it keeps; all by all-to-all. For u
different rows of width d a rank sends about (n-1)/n u d elements to its askers and as many back to the owners,
where gathering all ranks' gradients (`sparse_rows`) sends (n-1) u d, and an all-reduce the whole table.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.primitives import DTYPE_BYTES
from autopar.ir.training_graph import Lookup
from autopar.strategies.base import Group, WireDtype
from autopar.strategies.emitter import SORT_BYTES, Emitter
from autopar.strategies.value import Value


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


def waves(group: Group) -> tuple[Wave, ...]:
    """A group's lookups, in as few exchanges as their indices allow."""
    found = [
        (i, k) for i, m in enumerate(group.members) if m.parameter.table is not None for k in m.parameter.table.lookups
    ]
    cut: list[list[tuple[int, Lookup]]] = []
    for i, lookup in sorted(found, key=lambda one: one[1].position):
        if any(j == i and k.indices == lookup.indices for wave in cut for j, k in wave):
            continue
        if not cut or lookup.known >= cut[-1][0][1].position:
            cut.append([])
        cut[-1].append((i, lookup))
    return tuple(
        Wave(tuple(w), max(k.known for _, k in w), min(k.position for _, k in w) - 1, _turn(group, w)) for w in cut
    )


def _turn(group: Group, entries: list[tuple[int, Lookup]]) -> int | None:
    positions = []
    for i, lookup in entries:
        table = group.members[i].parameter.table
        assert table is not None
        positions += [t.position for t in table.parts.terms if t.left == lookup.indices]
    return max(positions, default=None)


def row_shares(group: Group, world_size: int) -> tuple[int, ...]:
    """Elements of a group's parameters that each rank keeps: rank r has rows r, r+n, r+2n, ..."""
    return tuple(
        sum(m.elements // max(1, m.shape[0]) * len(range(r, m.shape[0], world_size)) for m in group.members)
        for r in range(world_size)
    )


class RowExchange:
    """Emits the exchange of the rows of a group's tables. `autopar.runtime.lookups` does its works."""

    def __init__(self, group: Group, wire: WireDtype, emit: Emitter) -> None:
        self.group, self.emit = group, emit
        self.waves = waves(group)
        self.sent_as = group.dtype if wire == "same" else wire
        self._asked: list[tuple[Value, Value]] = []
        """By wave: how many rows each rank wants of each, and which of this rank's."""

    def look_up(self) -> None:
        """The forward pass: rows come from their owners in time for their lookups, and what is computed before these
        hides the ways there and back."""
        emit, group, n = self.emit, self.group, self.emit.world_size
        for i, wave in enumerate(self.waves):
            asked, found, needed = (wave.known + k * (wave.needed - wave.known) // 3 for k in (1, 2, 3))
            length = 1 + n * len(wave.entries)
            counts = emit.local(
                f"rows.ask.{i}",
                group,
                elements=n * length,
                dtype="int64",
                splits=(length,) * n,
                position=wave.known,
                moved_bytes=sum(k.rows for _, k in wave.entries) * SORT_BYTES,
            )
            counts = emit.wait(emit.all_gather(counts), asked)
            ids = self._send(f"rows.wanted.{i}", [counts], _multiple(_distinct(wave), n), "int64", asked, found)
            rows = self._send(f"rows.found.{i}", [ids, counts], self._elements(wave), self.sent_as, found, needed)
            emit.local(
                f"rows.received.{i}",
                group,
                [rows],
                elements=rows.elements // n,
                dtype=group.dtype,
                position=needed,
                moved_bytes=self._bytes(wave),
            )
            self._asked.append((counts, ids))

    def gradient(self, also: Value | None = None) -> Value:
        """The backward pass: the gradients of this rank's rows, added to what a head has for them."""
        emit, group, n = self.emit, self.group, self.emit.world_size
        inputs = [] if also is None else [also]
        for i, (wave, asked) in enumerate(zip(self.waves, self._asked, strict=True)):
            if wave.turn is None:
                continue
            # What comes back has until the end of the backward pass.
            back = self._send(f"rows.returned.{i}", [], self._elements(wave), self.sent_as, wave.turn, emit.end)
            inputs += [*asked, back]
        passes_over = also is None and all(map(emit.passes_over, group.members))
        return emit.local(
            "rows.gradient",
            group,
            inputs,
            elements=group.elements,
            dtype=group.dtype,
            splits=row_shares(group, n),
            sums=emit.everyone,
            ragged=False,
            position=emit.end,
            moved_bytes=group.elements // n * DTYPE_BYTES[group.dtype] + sum(map(self._bytes, self.waves)),
            touched=min(group.elements // n, sum(map(self._elements, self.waves))) if passes_over else None,
        )

    def _send(self, work: str, inputs: list[Value], each: int, dtype: str, position: int, until: int) -> Value:
        """A work whose value goes to the ranks that it is meant for, between two positions; `each`: expected elements
        a rank."""
        n = self.emit.world_size
        value = self.emit.local(
            work,
            self.group,
            inputs,
            elements=n * each,
            dtype=dtype,
            splits=(each,) * n,
            position=position,
            moved_bytes=2 * each * DTYPE_BYTES[dtype],
        )
        return self.emit.wait(self.emit.all_to_all(value), until)

    def _elements(self, wave: Wave) -> int:
        total = sum(k.distinct * self._width(i) for i, k in wave.entries)
        return _multiple(total, self.emit.world_size)

    def _bytes(self, wave: Wave) -> int:
        """Read and written, to take rows apart or put them together."""
        return 2 * sum(k.rows * self._width(i) for i, k in wave.entries) * DTYPE_BYTES[self.group.dtype]

    def _width(self, member: int) -> int:
        return self.group.members[member].shape[1]


def _distinct(wave: Wave) -> int:
    return sum(k.distinct for _, k in wave.entries)


def _multiple(elements: int, of: int) -> int:
    return -(-elements // of) * of
