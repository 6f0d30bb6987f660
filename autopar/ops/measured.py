"""Collectives by themselves, on values of nobody: what a calibration measures, and what its figures are compared to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.collectives import AllReduce, AllToAll, Broadcast, Collective, Reduce
from autopar.ops.context import Context, Server
from autopar.ops.exchanges import AllGather, ReduceScatter
from autopar.ops.layouts import Layout, Owned, Shard, unsummed
from autopar.ops.servers import ServerReduce
from autopar.ops.subgroups import Subgroups, subgroup_of
from autopar.ops.values import Value


@dataclass(frozen=True, slots=True)
class Given(Operation):
    """A value that is there."""

    name = "given"
    made: Value

    def value(self, at: Emission) -> Value:
        return self.made

    def write(self, site: Site, call: Call) -> Any:
        return site.empty(call)


def _given(elements: int, dtype: str, layout: Layout) -> Call:
    """A call of it."""
    made = Value(elements, dtype, layout)
    return Call(0, Given(made), (), None, made)


def collective_named(
    name: str,
    elements: int,
    world_size: int,
    subgroups: Subgroups = (),
    *,
    dtype: str = "float32",
    owner: int = 0,
    sizes: Sequence[int] | None = None,
) -> Call:
    """A collective by its name, outside of any step. `sizes`: elements of each rank's part, or of what each adds up,
    by default in even shares; `owner`: the rank that a reduce goes to, or a broadcast comes from."""
    even = [elements // len(subgroup_of(r, subgroups, world_size)) for r in range(world_size)]
    parts = tuple(even if sizes is None else sizes)
    own, shard = unsummed(world_size), Shard(parts)
    known: dict[str, tuple[Collective, Layout]] = {
        "all_reduce": (AllReduce(subgroups), own),
        "reduce": (Reduce(subgroups, owner=owner), own),
        "broadcast": (Broadcast(subgroups), Owned(owner)),
        "reduce_scatter": (ReduceScatter(subgroups, sizes=parts), own),
        "all_gather": (AllGather(subgroups), shard),
        "all_to_all": (AllToAll(subgroups), shard),
        "served_sum": (ServerReduce(subgroups, summed_by=parts), own),
    }
    op, layout = known[name]
    context = Context(world_size, servers=(Server("server", 1.0),) * (len(parts) - world_size))
    source = _given(elements, dtype, layout)
    return Call(1, op, (source,), None, op.value(Emission(None, (source,), context)))
