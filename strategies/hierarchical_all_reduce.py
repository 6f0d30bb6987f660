"""Hierarchical all-reduce: a sum within each host, sums across hosts, and back.

A reduce-scatter among the ranks of a host, an all-reduce of each part across hosts, an all-gather within the host. With
h hosts of k ranks, each host's link carries 2 (h-1)/h of the bucket, where a ring through all ranks puts
2 (hk-1)/(hk) there: half as much at two hosts of two. Two-level schemes of Horovod and NCCL; Jia et al., 2018
(arXiv:1807.11205). With `inner` the subgroups are any k ranks that follow one another: a 2-D all-reduce, of fewer
rounds (Ying et al., 2018, arXiv:1811.06992).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from pydantic import Field

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.shares import split_by_share
from autopar.ops.subgroups import Subgroups
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter


class HierarchicalAllReduceOptions(Options):
    inner: int = Field(default=0, ge=0)
    """How many ranks that follow one another form an inner subgroup; 0 for those of a host."""
    wire: WireDtype = "same"
    """Number format on the wire; anything but `same` rounds the gradients, which the plan must allow."""


class HierarchicalAllReduce(Strategy):
    name = "hierarchical_all_reduce"
    summary = "sum within each host, then across hosts; every rank updates its replica"
    options_type = HierarchicalAllReduceOptions

    def applies(self, member: Member, context: Context) -> str | None:
        n = context.world_size
        return None if _sizes(n) else f"{n} ranks do not divide into subgroups of equal size"

    def options(self, context: Context) -> Sequence[HierarchicalAllReduceOptions]:
        found = [HierarchicalAllReduceOptions()] if inner_subgroups(0, context) else []
        return [*found, *(HierarchicalAllReduceOptions(inner=size) for size in _sizes(context.world_size))]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, HierarchicalAllReduceOptions)
        inner = inner_subgroups(options.inner, emit.context)
        bucket = emit.pack(group, options.wire)
        if inner is None:  # one rank, or a cluster without hosts of equal size: nothing to gain from levels
            emit.update(emit.wait(emit.all_reduce(bucket)), group)
            return
        outer = tuple(zip(*inner, strict=True))
        sizes, parts = [0] * emit.world_size, split_by_share(group.elements, (1.0,) * len(inner[0]))
        for subgroup in inner:
            for rank, part in zip(subgroup, parts, strict=True):
                sizes[rank] = part
        partial = emit.wait(emit.reduce_scatter(bucket, sizes, inner))
        summed = emit.wait(emit.all_reduce(partial, outer))
        emit.update(emit.wait(emit.all_gather(summed, inner)), group)


@lru_cache(maxsize=64)
def _sizes(world_size: int) -> tuple[int, ...]:
    """Those of subgroups that are neither one rank nor all."""
    return tuple(size for size in range(2, world_size) if world_size % size == 0)


def inner_subgroups(size: int, context: Context) -> Subgroups | None:
    """The inner subgroups: ranks of a host, or `size` ranks that follow one another; `None` where they are not of equal
    size, or not several."""
    return _inner_subgroups(size, context.world_size, () if size else tuple(context.hosts))


@lru_cache(maxsize=256)
def _inner_subgroups(size: int, n: int, hosts: tuple[Hashable, ...]) -> Subgroups | None:
    ranks: dict[Hashable, list[int]] = {}
    for rank, host in enumerate([r // size for r in range(n)] if size else hosts or range(n)):
        ranks.setdefault(host, []).append(rank)
    subgroups = tuple(map(tuple, ranks.values()))
    sizes = {len(subgroup) for subgroup in subgroups}
    return subgroups if len(sizes) == 1 and 1 < len(subgroups) < n else None
