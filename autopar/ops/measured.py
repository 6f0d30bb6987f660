"""Collectives by themselves, on values of nobody: what a calibration measures, and what its figures are compared to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ops.base import Call, Operation, Site, Value
from autopar.ops.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, Reduce, ReduceScatter
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.layouts import Layout, Owned, Shard, unsummed
from autopar.ops.subgroups import Subgroups, subgroup_of


@dataclass(frozen=True, slots=True)
class Given(Operation):
    """A value that is there."""

    name = "given"
    made: Value

    def value(self, group: Group | None, inputs: Sequence[Call], context: Context) -> Value:
        return self.made

    def write(self, site: Site, call: Call) -> Any:
        return site.empty(call)


def given(elements: int, dtype: str, layout: Layout) -> Call:
    """A call of it."""
    made = Value(elements, dtype, layout)
    return Call(0, Given(made), (), None, made, stage=0)


def alone(op: Collective, source: Call, world_size: int) -> Call:
    """A collective on a value, outside of any step."""
    return Call(1, op, (source,), None, op.value(None, (source,), Context(world_size)), stage=0)


def even_call(
    name: str, elements: int, world_size: int, subgroups: Subgroups = (), dtype: str = "float32", owner: int = 0
) -> Call:
    """A collective by its name, on a value in even shares."""
    sizes = tuple(elements // len(subgroup_of(r, subgroups, world_size)) for r in range(world_size))
    own, shard = unsummed(world_size), Shard(sizes)
    op, layout = _collectives(subgroups, sizes, owner, own, shard)[name]
    return alone(op, given(elements, dtype, layout), world_size)


def _collectives(
    subgroups: Subgroups, sizes: tuple[int, ...], owner: int, own: Layout, shard: Shard
) -> dict[str, tuple[Collective, Layout]]:
    return {
        "all_reduce": (AllReduce(subgroups), own),
        "reduce": (Reduce(subgroups, owner=owner), own),
        "broadcast": (Broadcast(subgroups), Owned(owner)),
        "reduce_scatter": (ReduceScatter(subgroups, sizes=sizes), own),
        "all_gather": (AllGather(subgroups), shard),
        "all_to_all": (AllToAll(subgroups), shard),
    }
