"""Writes the works of tables in shares of rows into a graph: which nodes' values they are given, and what lookups read
in the place of the table."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from autopar.ir.primitives import Primitive
from autopar.ir.training_graph import Lookup
from autopar.runtime import works
from autopar.runtime.rows import RowShards
from autopar.strategies.base import Member
from autopar.strategies.row_exchange import Wave, waves

if TYPE_CHECKING:
    from autopar.runtime.writer import Writer, Written


def _ask(w: Writer, p: Primitive, wave: int, inputs: Sequence[Any]) -> Written:
    indices = [w.copies[w.nodes[k.indices]] for _, k in _wave(w, p, wave).entries]
    w.asked[p.group, wave] = _do(w, p, "ask", wave, indices, w.is_last)
    return w.call(getattr, (w.asked[p.group, wave], "counts"))


def _wanted(w: Writer, p: Primitive, wave: int, inputs: Sequence[Any]) -> Written:
    w.counts[p.group, wave] = _do(w, p, "agreed", inputs[0])
    return works.message(w, _do(w, p, "wanted", w.asked[p.group, wave], w.counts[p.group, wave]))


def _found(w: Writer, p: Primitive, wave: int, inputs: Sequence[Any]) -> Written:
    return works.message(w, _do(w, p, "found", wave, inputs[0], w.counts[p.group, wave], getattr(torch, p.dtype)))


def _received(w: Writer, p: Primitive, wave: int, inputs: Sequence[Any]) -> Written:
    """Each lookup reads the rows that came, by their places among them, instead of the table."""
    rows = _do(w, p, "received", wave, inputs[0], w.counts[p.group, wave])
    places = w.call(getattr, (w.asked[p.group, wave], "places"))
    for i, (member, lookup) in enumerate(_wave(w, p, wave).entries):
        own, place = w.call(operator.getitem, (rows, i)), w.call(operator.getitem, (places, i))
        for same in _lookups(_members(w, p)[member]):
            if same.indices == lookup.indices:
                node = w.nodes[same.node]
                w.instead[node] = {node.args[0]: own, node.args[1]: place}  # type: ignore[dict-item]
    return None


def _returned(w: Writer, p: Primitive, wave: int, inputs: Sequence[Any]) -> Written:
    values, padding = [], []
    for member, lookup in _wave(w, p, wave).entries:
        own = _members(w, p)[member]
        assert own.parameter.table is not None
        known = zip(own.parameter.table.parts.terms, w.rows.get(own.slice.name, ()), strict=False)
        terms = [(value, t.padding) for t, (_, value) in known if t.left == lookup.indices]
        values.append([v for v, _ in terms])
        padding.append([pad for _, pad in terms])
    asked, counts = w.asked[p.group, wave], w.counts[p.group, wave]
    return works.message(
        w, _do(w, p, "returned", wave, asked, counts, values, padding, getattr(torch, p.dtype), w.scale)
    )


def _gradient(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    """`inputs`: a head's gradients, where there is one; then, of each exchange, counts, rows and what was returned."""
    tied = len(inputs) % 3 == 1
    exchanged = [i for i, wave in enumerate(waves(w.program.groups[p.group])) if wave.turn is not None]
    rest = inputs[tied:]
    received = [(wave, w.counts[p.group, wave], *rest[3 * i + 1 : 3 * i + 3]) for i, wave in enumerate(exchanged)]
    names = [m.slice.name for m in _members(w, p)]
    sparse = p.touched is not None and w.is_last and not any(w.has_earlier(n) for n in names)
    found = _do(w, p, "gradient", received, inputs[0] if tied else None, sparse)
    return [w.gradient(name, w.call(operator.getitem, (found, i))) for i, name in enumerate(names)]


_WORKS: dict[str, Callable[[Writer, Primitive, int, Sequence[Any]], Written]] = {
    "ask": _ask,
    "wanted": _wanted,
    "found": _found,
    "received": _received,
    "returned": _returned,
}
"""By the names that `autopar.strategies.row_exchange` gives them."""


def write(w: Writer, p: Primitive, work: str, inputs: Sequence[Any]) -> Written:
    """Writes one work, given the values of its inputs."""
    if work == "gradient":
        return _gradient(w, p, inputs)
    name, _, wave = work.partition(".")
    return _WORKS[name](w, p, int(wave), inputs)


def _members(w: Writer, p: Primitive) -> tuple[Member, ...]:
    return w.program.groups[p.group].members


def _lookups(member: Member) -> tuple[Lookup, ...]:
    return () if member.parameter.table is None else member.parameter.table.lookups


def _wave(w: Writer, p: Primitive, wave: int) -> Wave:
    return waves(w.program.groups[p.group])[wave]


def _do(w: Writer, p: Primitive, work: str, *args: Any) -> torch.fx.Node:
    name = f"rows_{p.group}"
    if name not in w.modules:
        members, target = _members(w, p), w.target
        w.modules[name] = RowShards(
            [target.shards[m.slice.name] for m in members],
            [m.shape[0] for m in members],
            [[member for member, _ in wave.entries] for wave in waves(w.program.groups[p.group])],
            target.rank,
            target.world_size,
        )
    return w.graph.call_method(work, (w.graph.get_attr(name), *args))
