"""Collectives of parts that ranks hold: reduce-scatter and all-gather, from each to each, or around a ring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from autopar.backends import collectives
from autopar.backends.exchange import ROUNDS_BYTES, alike
from autopar.ir.dtypes import DTYPE_BYTES, EXACT_BYTES
from autopar.ops.base import Call, Emission, Site
from autopar.ops.collectives import Collective, RankBytes, copied, other_ranks
from autopar.ops.layouts import REPLICATE, Partial, Shard, summed
from autopar.ops.links import Links, Phase, Vector
from autopar.ops.subgroups import all_subgroups, subgroup_of
from autopar.ops.values import NO_WORK, Bytes, Setting, Value, Work


@dataclass(frozen=True, slots=True)
class _Exchange(Collective):
    """Of parts that ranks hold: each to each, or around a ring."""

    def in_rounds(self, call: Call) -> bool:
        return max(self.sizes_of(call), default=0) * DTYPE_BYTES[call.dtype] > ROUNDS_BYTES

    def goes_around(self, call: Call, world_size: int) -> bool:
        """Whether messages of our own go around a ring; or from each to each."""
        return all(map(alike, self._parts(call, world_size)))

    def _parts(self, call: Call, world_size: int) -> list[list[int]]:
        """What each rank holds, by subgroup."""
        sizes = self.sizes_of(call)
        return [[sizes[r] for r in s] for s in all_subgroups(self.subgroups, world_size)]

    def _rest_and_share(self, call: Call, subgroup: tuple[int, ...]) -> tuple[list[int], list[int]]:
        sizes, width = self.sizes_of(call), DTYPE_BYTES[call.dtype]
        rest = [call.bytes - sizes[r] * width for r in subgroup]
        return rest, [(len(subgroup) - 1) * sizes[r] * width for r in subgroup]

    def _around(self, call: Call, links: Links) -> list[Phase]:
        n = links.world_size
        held: Vector = np.array(self.sizes_of(call), float) * DTYPE_BYTES[call.dtype]
        return [(self.name, links.ring(self.subgroups, other_ranks(self.subgroups, n) * held))]


@dataclass(frozen=True, slots=True)
class ReduceScatter(_Exchange):
    """The sum over ranks; rank r keeps `sizes[r]` elements (0 is allowed), in the order of ranks."""

    name = "reduce_scatter"
    sizes: tuple[int, ...] = ()

    def value(self, at: Emission) -> Value:
        n, elements = at.world_size, at.inputs[0].elements
        assert len(self.sizes) == n, "one part a rank"
        within = [[self.sizes[r] for r in ranks] for ranks in self.subgroups] or [[*self.sizes]]
        assert all(sum(sizes) == elements for sizes in within), "the parts of a subgroup must cover the value"
        return replace(at.inputs[0].made, layout=summed(at.inputs[0].layout, self.subgroups, Shard(self.sizes)))

    def sizes_of(self, call: Call) -> tuple[int, ...]:
        return self.sizes

    def goes_around(self, call: Call, world_size: int) -> bool:
        """They add up on their way, so that narrow numbers would be rounded each time."""
        return DTYPE_BYTES[call.dtype] >= EXACT_BYTES and _Exchange.goes_around(self, call, world_size)

    def _adds_on_its_way(self, call: Call, world_size: int, rounds: bool, sums: bool) -> bool:
        """Whether parts are added up on their way around a ring: the backend's own (`sums`), or one in rounds of
        ours."""
        if sums:
            equal = all(len(set(each)) == 1 for each in self._parts(call, world_size))
            return equal and DTYPE_BYTES[call.dtype] >= EXACT_BYTES
        return rounds and self.in_rounds(call) and self.goes_around(call, world_size)

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        """Bytes of a part of every rank; around a ring of ours, of one part for each rank that a sum comes by; around
        the backend's own, of this rank's part alone."""
        parts = len(all_subgroups(self.subgroups, setting.world_size)[0])
        if self._adds_on_its_way(call, setting.world_size, setting.rounds, setting.sums):
            parts = 1 if setting.sums else parts - 1
        return call.held_bytes(setting.world_size) * parts

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        return self._rest_and_share(call, subgroup)

    def phases(self, call: Call, links: Links) -> list[Phase]:
        if self._adds_on_its_way(call, links.world_size, not links.chains, links.sums):
            return self._around(call, links)
        held: Vector = np.array(self.sizes, float) * DTYPE_BYTES[call.dtype]
        return [(self.name, links.to_each(self.subgroups, held))]

    def write(self, site: Site, call: Call) -> Any:
        subgroup = subgroup_of(site.rank, self.subgroups, site.world_size)
        value, place = site.value_of(call.inputs[0]), subgroup.index(site.rank)
        if call.made.expected:
            arguments = (value, len(subgroup), place, self.channel(site, call))
            return site.call(collectives.reduce_scatter_equal, arguments)
        sizes = [self.sizes[r] for r in subgroup]
        return site.call(collectives.reduce_scatter, (value, sizes, place, self.channel(site, call)))

    def finish_work(self, wait: Call, rank: int, setting: Setting) -> Work:
        """Adds up the parts that came from all ranks, unless the backend itself did so on their way."""
        if setting.sums and self._came_summed(wait, setting):
            return NO_WORK
        parts = len(subgroup_of(rank, self.subgroups, setting.world_size))
        width = parts * DTYPE_BYTES[wait.dtype] + DTYPE_BYTES[wait.owner_group.dtype]
        return copied(wait.held_elements(rank) * width)

    def finish_allocates(self, wait: Call, setting: Setting) -> Bytes | None:
        """Bytes of the sum, in the dtype in which parts are added up."""
        dtype = self._sum_dtype(wait, wait.op == wait.op.when_sent())
        if self._came_summed(wait, setting) and dtype == wait.dtype:
            return None
        return wait.held_bytes(setting.world_size) // DTYPE_BYTES[wait.dtype] * DTYPE_BYTES[dtype]

    def finish_passing_bytes(self, wait: Call, setting: Setting) -> Bytes:
        """Bytes of parts in a narrow dtype, which are widened before they are added up, unless their sum is sent on."""
        wide, narrow = DTYPE_BYTES[self._sum_dtype(wait, wait.op == wait.op.when_sent())], DTYPE_BYTES[wait.dtype]
        if wide <= narrow or self._came_summed(wait, setting):
            return 0
        parts = [len(s) for s in all_subgroups(self.subgroups, setting.world_size)]
        return wait.held_bytes(setting.world_size) // narrow * max(parts) * wide

    def _sum_dtype(self, wait: Call, sent: bool) -> str:
        """The wire's where the sum is sent on, else the parameters'."""
        return wait.dtype if sent else wait.owner_group.dtype

    def _came_summed(self, wait: Call, setting: Setting) -> bool:
        """Whether it went around a ring, and was added up there."""
        return self._adds_on_its_way(wait.inputs[0], setting.world_size, setting.rounds, setting.sums)

    def finish(self, site: Site, wait: Call, value: Any, sent: bool) -> Any:
        return site.sum_parts(wait, value, getattr(torch, self._sum_dtype(wait, sent)))


@dataclass(frozen=True, slots=True)
class AllGather(_Exchange):
    """Every rank's part of a sharded value, one after the other, on every rank."""

    name = "all_gather"

    def value(self, at: Emission) -> Value:
        layout = at.inputs[0].layout
        if isinstance(layout, Partial):
            return replace(at.inputs[0].made, layout=Partial(layout.summed, REPLICATE))
        assert isinstance(layout, Shard), f"an all-gather takes what is sharded, not {layout}"
        return replace(at.inputs[0].made, layout=REPLICATE)

    def sizes_of(self, call: Call) -> tuple[int, ...]:
        return call.inputs[0].sizes

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        """Where parts are unequal, each is repeated for every receiver."""
        subgroup, sizes = subgroup_of(rank, self.subgroups, setting.world_size), self.sizes_of(call)
        if len({sizes[r] for r in subgroup}) == 1:
            return NO_WORK
        return copied((1 + len(subgroup)) * sizes[rank] * DTYPE_BYTES[call.dtype])

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        sizes = self.sizes_of(call)
        if len(set(sizes)) == 1 or (setting.rounds and self.in_rounds(call)):
            return call.bytes
        repeated: npt.NDArray[np.int64] = np.array(sizes, np.int64) * DTYPE_BYTES[call.dtype] * setting.world_size
        return repeated + call.bytes

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """Gloo receives equal parts into memory of its own, and copies them from there."""
        is_gloos = setting.rounds and not self.in_rounds(call) and len(set(self.sizes_of(call))) == 1
        return call.bytes if is_gloos else 0

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        rest, share = self._rest_and_share(call, subgroup)
        return share, rest

    def phases(self, call: Call, links: Links) -> list[Phase]:
        n = links.world_size
        rounds = not links.chains and self.in_rounds(call)
        equal = all(len(set(each)) == 1 for each in self._parts(call, n))
        if self.goes_around(call, n) if rounds else equal:
            return self._around(call, links)
        held: Vector = np.array(self.sizes_of(call), float) * DTYPE_BYTES[call.dtype]
        return [(ReduceScatter.name, links.from_each(self.subgroups, held))]

    def write(self, site: Site, call: Call) -> Any:
        subgroup = subgroup_of(site.rank, self.subgroups, site.world_size)
        value = site.value_of(call.inputs[0])
        if call.made.expected:
            return site.call(collectives.all_gather_equal, (value, len(subgroup), self.channel(site, call)))
        sizes = [self.sizes_of(call)[r] for r in subgroup]
        arguments = (value, sizes, subgroup.index(site.rank), self.channel(site, call))
        return site.call(collectives.all_gather, arguments)
