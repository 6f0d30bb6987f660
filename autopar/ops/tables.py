"""The operations of tables whose rows live on one rank each: rows come for lookups, and their gradients go back.

`autopar.ops.row_shards` does the work.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.training_graph import Lookup
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.group import Group, Member
from autopar.ops.layouts import VARYING, Shard
from autopar.ops.messages import unpacked
from autopar.ops.parts import PART_KERNELS, SORT_BYTES
from autopar.ops.row_shards import RowShards
from autopar.ops.shares import row_shares
from autopar.ops.values import Bytes, Setting, Value, Work
from autopar.ops.waves import Wave


@dataclass(frozen=True, slots=True)
class _OfRows(Operation):
    """An operation of the exchange of rows that serves the lookups of a wave, by its number."""

    needs_only_inputs = True

    wave: int

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return Work(moved_bytes=self.moved_bytes(call), kernels=PART_KERNELS * len(call.members))

    def moved_bytes(self, call: Call) -> int:
        """By default, what is sent, read and written."""
        return 2 * call.sizes[0] * DTYPE_BYTES[call.dtype]

    def of(self, group: Group) -> Wave:
        return group.waves[self.wave]

    def to_each(self, each: int, dtype: str, n: int) -> Value:
        """A message of `each` expected elements a rank."""
        return Value(n * each, dtype, Shard((each,) * n), expected=True)

    def asked(self, site: Site, call: Call) -> Any:
        """Which rows this rank wants."""
        return site.notes(call.owner_group)["asked", self.wave]

    def counts(self, site: Site, call: Call) -> Any:
        """How many rows each rank wants of each."""
        return site.notes(call.owner_group)["counts", self.wave]


@dataclass(frozen=True, slots=True)
class AskRows(_OfRows):
    """How many rows this rank wants of each owner, of each lookup; for all to know."""

    name = "rows.ask"

    def behind(self, group: Group) -> int:
        return self.of(group).known

    def value(self, at: Emission) -> Value:
        return self.to_each(1 + at.world_size * len(self.of(at.group).entries), "int64", at.world_size)

    def moved_bytes(self, call: Call) -> int:
        return sum(k.rows for _, k in self.of(call.owner_group).entries) * SORT_BYTES

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        indices = [site.computed(k.indices) for _, k in self.of(group).entries]
        asked = _do(site, call, "ask", self.wave, indices, site.is_last)
        site.notes(group)["asked", self.wave] = asked
        return site.call(getattr, (asked, "counts"))


@dataclass(frozen=True, slots=True)
class WantRows(_OfRows):
    """To each owner, which of its rows this rank wants. Inputs: the counts of all ranks."""

    name = "rows.wanted"

    def value(self, at: Emission) -> Value:
        n, distinct = at.world_size, sum(k.distinct for _, k in self.of(at.group).entries)
        return self.to_each(_multiple(distinct, n), "int64", n)

    def write(self, site: Site, call: Call) -> Any:
        counts = _do(site, call, "agreed", site.value_of(call.inputs[0]))
        site.notes(call.owner_group)["counts", self.wave] = counts
        return unpacked(site, _do(site, call, "wanted", self.asked(site, call), counts))


@dataclass(frozen=True, slots=True)
class _SendRows(_OfRows):
    """A message that holds the rows of a wave's lookups, or their gradients."""

    sent_as: str

    def value(self, at: Emission) -> Value:
        n = at.world_size
        return self.to_each(_expected(at.group, self.of(at.group), n), self.sent_as, n)


@dataclass(frozen=True, slots=True)
class FindRows(_SendRows):
    """To each rank, the rows that it wants of this one's. Inputs: which ones, the counts."""

    name = "rows.found"

    def write(self, site: Site, call: Call) -> Any:
        wanted, counts = site.value_of(call.inputs[0]), self.counts(site, call)
        return unpacked(site, _do(site, call, "found", self.wave, wanted, counts, call.torch_dtype))


@dataclass(frozen=True, slots=True)
class ReceiveRows(_OfRows):
    """Each lookup reads the rows that came, by their places among them, instead of the table. Inputs: the rows."""

    name = "rows.received"

    def needed(self, group: Group) -> int:
        return self.of(group).needed

    def value(self, at: Emission) -> Value:
        return Value(at.inputs[0].elements // at.world_size, at.group.dtype, VARYING, expected=True)

    def moved_bytes(self, call: Call) -> int:
        return _row_bytes(call.owner_group, self.of(call.owner_group))

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        rows = _do(site, call, "received", self.wave, site.value_of(call.inputs[0]), self.counts(site, call))
        places = site.call(getattr, (self.asked(site, call), "places"))
        for i, (member, lookup) in enumerate(self.of(group).entries):
            own, place = (site.call(operator.getitem, (x, i)) for x in (rows, places))
            for same in _lookups(group.members[member]):
                if same.indices == lookup.indices:
                    site.look_up(same.node, own, place)
        return None


@dataclass(frozen=True, slots=True)
class ReturnRows(_SendRows):
    """To each owner, the gradients of its rows."""

    name = "rows.returned"

    def behind(self, group: Group) -> int:
        turn = self.of(group).turn
        assert turn is not None, "rows that get no gradient are not returned"
        return turn

    def write(self, site: Site, call: Call) -> Any:
        values, padding = [], []
        for member, lookup in self.of(call.owner_group).entries:
            own = call.owner_group.members[member]
            assert own.parameter.table is not None
            known = zip(own.parameter.table.parts.terms, site.rows_of(own.slice.name), strict=False)
            terms = [(value, t.padding) for t, (_, value) in known if t.left == lookup.indices]
            values.append([v for v, _ in terms])
            padding.append([pad for _, pad in terms])
        asked, counts = self.asked(site, call), self.counts(site, call)
        arguments = (self.wave, asked, counts, values, padding, call.torch_dtype, site.scale)
        return unpacked(site, _do(site, call, "returned", *arguments))


@dataclass(frozen=True, slots=True)
class RowsGradient(Operation):
    """The gradients of this rank's rows. Inputs: with `tied` a head's gradients, to which they are added; then, of each
    wave, the counts, which rows were wanted, and what was returned."""

    name = "rows.gradient"
    tied: bool
    touched: int | None = None

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, Shard(row_shares(at.group, at.world_size)))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        group = call.owner_group
        own = group.elements // setting.world_size * DTYPE_BYTES[group.dtype]
        moved = own + sum(_row_bytes(group, wave) for wave in group.waves)
        return Work(moved_bytes=moved, kernels=PART_KERNELS * len(call.members))

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        if self.touched is not None:
            return self.touched * DTYPE_BYTES[call.dtype]
        return call.held_bytes(setting.world_size)

    def replaces(self, group: Group) -> Sequence[str]:
        tables = [m.parameter.table for m in group.members]
        return [name for table in tables if table is not None for name in table.parts.replaced]

    def write(self, site: Site, call: Call) -> Any:
        group, inputs = call.owner_group, [site.value_of(i) for i in call.inputs]
        exchanged = [i for i, wave in enumerate(group.waves) if wave.turn is not None]
        rest, counts = inputs[self.tied :], site.notes(group)
        received = [(w, counts["counts", w], *rest[3 * i + 1 : 3 * i + 3]) for i, w in enumerate(exchanged)]
        sparse = self.touched is not None and site.is_last and not any(map(site.has_earlier, group.names))
        found = _do(site, call, "gradient", received, inputs[0] if self.tied else None, sparse)
        return [site.gradient(name, site.call(operator.getitem, (found, i))) for i, name in enumerate(group.names)]


def touched_rows(group: Group, world_size: int) -> int:
    """Elements of a rank's share that the rows looked up are expected to touch."""
    return min(group.elements // world_size, sum(_expected(group, w, world_size) for w in group.waves))


def _expected(group: Group, wave: Wave, n: int) -> int:
    """Elements of the rows that a rank's lookups name."""
    return _multiple(sum(k.distinct * group.members[i].shape[1] for i, k in wave.entries), n)


def _row_bytes(group: Group, wave: Wave) -> int:
    """Read and written, to take rows apart or put them together."""
    return 2 * sum(k.rows * group.members[i].shape[1] for i, k in wave.entries) * DTYPE_BYTES[group.dtype]


def _multiple(elements: int, of: int) -> int:
    return -(-elements // of) * of


def _lookups(member: Member) -> tuple[Lookup, ...]:
    return () if member.parameter.table is None else member.parameter.table.lookups


def _do(site: Site, call: Call, method: str, *arguments: Any) -> Any:
    """Calls a method of this rank's rows."""
    group = call.owner_group

    def make() -> RowShards:
        return RowShards(
            [site.shards[name] for name in group.names],
            [m.shape[0] for m in group.members],
            [[member for member, _ in wave.entries] for wave in group.waves],
            site.rank,
            site.world_size,
        )

    return site.call_method(method, (site.module_of(f"rows_{group.index}", make), *arguments))
