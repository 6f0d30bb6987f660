"""Collectives among all ranks, or within subgroups. `exchanges` has those of parts, `waits` what completes them all.

The bytes are those of the algorithms that run (gloo's, and those of `autopar.backends`); `tests/lab` holds them to what
is seen on the wire. n ranks in a subgroup, S bytes in all, s_r of them held by rank r:

==============  ========================================  ==========================================
collective      sent by a rank                            received by a rank
==============  ========================================  ==========================================
all-reduce      2 (n-1)/n S: a ring                       2 (n-1)/n S
reduce          R_r + P_r; the owner R_r: a ring's        R of the next; the owner also what
                reduce-scatter, then parts to the owner   the others' parts P are
broadcast       S for each child in a binomial tree       S; the owner nothing
reduce-scatter  S - s_r: to each rank its part            (n-1) s_r
all-gather      (n-1) s_r                                 S - s_r
all-to-all      (n-1)/n s_r                               (S - s_r)/n
==============  ========================================  ==========================================

R and P are of `reduce_bytes`: P is S/n, R (n-1)/n S for small values and nearly S for large ones.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.backends import collectives
from autopar.backends.exchange import ROUNDS_BYTES
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.layouts import REPLICATE, Owned, Partial, Shard, summed
from autopar.ops.links import Links, Phase, Vector
from autopar.ops.subgroups import Subgroups, all_subgroups
from autopar.ops.values import NO_WORK, Bytes, Setting, Value, Work

RankBytes = tuple[list[int], list[int]]
"""Bytes sent and bytes received, each by the rank's place in its subgroup."""


@dataclass(frozen=True, slots=True)
class Collective(Operation):
    """A collective: an operation that ranks run together. A subclass says its value, the bytes that ranks send, the
    traffic on links, and the function that runs it."""

    is_collective = True
    reads_members = False
    needs_only_inputs = True

    subgroups: Subgroups = ()

    @abstractmethod
    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        """Bytes that each rank of a subgroup (of two ranks or more) sends and receives for a call."""

    @abstractmethod
    def phases(self, call: Call, links: Links) -> list[Phase]:
        """The collective's parts that follow one another, each with its name and the bytes on each link."""

    def rounds(self, size: int, phases: int, chains: bool) -> int:
        """Messages that follow one another, each of which waits for the links' latency. `size`: ranks of the largest
        subgroup; `phases`: how many `phases` it has; `chains`: as in `Links`."""
        return size - 1 + (phases - 1)

    def sizes_of(self, call: Call) -> tuple[int, ...]:
        """Elements of each rank's part, by rank, where the collective divides the value; else empty."""
        return call.sizes

    def owner_of(self, call: Call) -> int | None:
        """The rank that a reduce sums to or a broadcast sends from; `None` for other collectives."""
        return self.sender(call)

    def order_line(self, call: Call) -> str:
        """The line by which ranks compare the collective before the first step. Sizes that the batch decides are left
        out."""
        if call.made.expected:
            return f"{self.name} ragged {call.dtype}"
        of_ranks = f"{self.sizes_of(call)} {self.owner_of(call)} {self.subgroups}"
        return f"{self.name} {call.elements} {call.dtype} {of_ranks} {call.communicator}"

    def in_rounds(self, call: Call) -> bool:
        """Whether autopar sends the messages itself on CPUs (`autopar.backends.exchange`); such collectives of one
        process group follow one another."""
        return False

    def pieces(self, call: Call) -> int:
        """In how many pieces a value goes whose last one comes back when all parts have gone; 0 where none does."""
        return 0

    def finish_work(self, wait: Call, rank: int, setting: Setting) -> Work:
        """FLOPs, bytes and kernels of the collective's wait on a rank's device."""
        return NO_WORK

    def finish_allocates(self, wait: Call, setting: Setting) -> Bytes | None:
        """Bytes that each rank allocates for the value as the collective is waited for; `None`: it is there already."""
        return None

    def finish_passing_bytes(self, wait: Call, setting: Setting) -> Bytes:
        """Bytes of temporary memory that each rank allocates while the collective is waited for."""
        return 0

    def finish(self, site: Site, wait: Call, value: Any, sent: bool) -> Any:
        """Completes the collective at a site; returns its value. `sent`: whether another collective sends the value
        on."""
        return value

    def channel(self, site: Site, call: Call) -> Any:
        return site.channel(self.subgroups, call.communicator)

    def size_bytes(self, call: Call, world_size: int) -> int:
        """Bytes of the message that a calibration is asked for: one that takes as long as this call."""
        return call.bytes

    def served_bytes(self, call: Call, world_size: int) -> list[int]:
        """Bytes that each serving host sends; it receives as many."""
        return []


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """The sum over ranks, on every rank; of a sharded value, of the part that all ranks of a subgroup hold."""

    name = "all_reduce"
    in_place = True

    def value(self, at: Emission) -> Value:
        made, layout = at.inputs[0].made, at.inputs[0].layout
        assert isinstance(layout, Partial), "an all-reduce takes values that are still to be added up"
        for subgroup in self.subgroups if isinstance(layout.of, Shard) else ():
            assert len({at.inputs[0].sizes[r] for r in subgroup}) == 1, "an all-reduce needs values of one size"
        return replace(made, layout=summed(layout, self.subgroups, layout.of))

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        n, width = len(subgroup), DTYPE_BYTES[call.dtype]
        of_size = {held: 2 * round((n - 1) / n * held * width) for held in {*map(call.held_elements, subgroup)}}
        ring = [of_size[call.held_elements(r)] for r in subgroup]
        return ring, ring

    def phases(self, call: Call, links: Links) -> list[Phase]:
        others = other_ranks(self.subgroups, links.world_size)
        return [
            (self.name, links.ring(self.subgroups, 2 * others / (others + 1) * held_by_rank(call, links.world_size)))
        ]

    def rounds(self, size: int, phases: int, chains: bool) -> int:
        return 2 * (size - 1)

    def size_bytes(self, call: Call, world_size: int) -> int:
        """Bytes of the largest part of the value that a subgroup sums up."""
        return int(call.held_by_rank(world_size).max()) * DTYPE_BYTES[call.dtype]

    def write(self, site: Site, call: Call) -> Any:
        return site.call(collectives.all_reduce, (site.value_of(call.inputs[0]), self.channel(site, call)))


@dataclass(frozen=True, slots=True)
class Reduce(Collective):
    """The sum of a value over ranks, on rank `owner` alone."""

    name = "reduce"
    in_place = True
    owner: int = 0

    def owner_of(self, call: Call) -> int | None:
        return self.owner

    def value(self, at: Emission) -> Value:
        summed(at.inputs[0].layout, (), REPLICATE)
        return replace(at.inputs[0].made, layout=Owned(self.owner))

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        n = len(subgroup)
        ring, parts = reduce_bytes(call.bytes, n, DTYPE_BYTES[call.dtype])
        gathered = call.bytes - parts[subgroup.index(self.owner)]
        return (
            [ring[i] + (0 if r == self.owner else parts[i]) for i, r in enumerate(subgroup)],
            [ring[(i + 1) % n] + (gathered if r == self.owner else 0) for i, r in enumerate(subgroup)],
        )

    def phases(self, call: Call, links: Links) -> list[Phase]:
        n, size = links.world_size, call.bytes
        if links.chains:
            return [(self.name, links.ring((), _all_but(self.owner, n, size)))]
        # Senders do not meet at the owner as they do in an all-to-all. [Empirical: four hosts at 0.4 and 1.5 Gbit/s, 1
        # to 64 MiB]
        ring, parts = reduce_bytes(size, n, DTYPE_BYTES[call.dtype])
        from_each = np.zeros(n)
        from_each[self.owner] = (size - parts[self.owner]) / (n - 1)
        return [(self.name, links.ring((), np.array(ring, float))), (self.name, links.to_each((), from_each))]

    def write(self, site: Site, call: Call) -> Any:
        return site.call(collectives.reduce, (site.value_of(call.inputs[0]), self.owner, self.channel(site, call)))


@dataclass(frozen=True, slots=True)
class Broadcast(Collective):
    """The value that one rank owns, on every rank."""

    name = "broadcast"

    def value(self, at: Emission) -> Value:
        return replace(at.inputs[0].made, layout=REPLICATE)

    def sender(self, call: Call) -> int:
        layout = call.inputs[0].layout
        assert isinstance(layout, Owned), f"a broadcast takes what one rank has, not {layout}"
        return layout.rank

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return np.where(np.arange(setting.world_size) == self.sender(call), 0, call.bytes)

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        n, size, owner = len(subgroup), call.bytes, self.sender(call)
        root = subgroup.index(owner)
        counts = _children_counts(n)
        children = (*counts[n - root :], *counts[: n - root])
        return [c * size for c in children], [0 if r == owner else size for r in subgroup]

    def phases(self, call: Call, links: Links) -> list[Phase]:
        n, size, owner = links.world_size, call.bytes, self.sender(call)
        if links.chains:
            return [(self.name, links.ring((), _all_but((owner - 1) % n, n, size)))]
        # A binomial tree; a rank that has received the whole message sends it to all its children at once.
        found: list[Phase] = []
        level = [0]
        while level:
            ways = [((p + owner) % n, (c + owner) % n) for p in level for c in broadcast_children(p, n)]
            if ways:
                found.append((self.name, links.along([(a, b, float(size)) for a, b in ways])))
            level = [(b - owner) % n for _, b in ways]
        return found

    def rounds(self, size: int, phases: int, chains: bool) -> int:
        return phases if not chains else size - 1 + (phases - 1)

    def write(self, site: Site, call: Call) -> Any:
        owner = self.sender(call)
        value = site.value_of(call.inputs[0]) if site.rank == owner else site.empty(call)
        return site.call(collectives.broadcast, (value, owner, self.channel(site, call)))


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """What each rank has for every other one, of a value that is each rank's own; as much again is expected."""

    name = "all_to_all"

    def value(self, at: Emission) -> Value:
        assert at.inputs[0].sizes, "an all-to-all sends what each rank has of its own"
        return at.inputs[0].made

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        n, held = len(subgroup), [call.sizes[r] * DTYPE_BYTES[call.dtype] for r in subgroup]
        return [h - h // n for h in held], [(call.bytes - h) // n for h in held]

    def phases(self, call: Call, links: Links) -> list[Phase]:
        """Senders meet at a receiver where parts are too large for the buffers on their way, and do not go in rounds.
        [Empirical: four hosts at 0.4 Gbit/s reach 0.9 of the line rate with parts of 32 and 64 KiB, and 0.87 in rounds
        of 256 KiB and 1 MiB]"""
        parts = held_by_rank(call, links.world_size) / (other_ranks(self.subgroups, links.world_size) + 1)
        meets = links.chains or (self._is_large(call) and not self.in_rounds(call))
        return [(self.name if meets else "reduce_scatter", links.from_each(self.subgroups, parts))]

    def in_rounds(self, call: Call) -> bool:
        """Large parts whose sizes the plan decides; of those that the batch decides, ranks may say otherwise."""
        return not call.made.expected and self._is_large(call)

    def _is_large(self, call: Call) -> bool:
        subgroups = all_subgroups(self.subgroups, len(call.sizes))
        largest = max(call.sizes[rank] // len(each) for each in subgroups for rank in each)
        return largest * DTYPE_BYTES[call.dtype] > ROUNDS_BYTES

    def write(self, site: Site, call: Call) -> Any:
        message = site.message(call.inputs[0])
        return site.call(collectives.all_to_all, (*message, self.channel(site, call), self.in_rounds(call)))


def copied(moved_bytes: float, kernels: float = 1.0) -> Work:
    """The work of a copy that reads and writes `moved_bytes` bytes; none for 0 bytes."""
    return Work(moved_bytes=moved_bytes, kernels=kernels) if moved_bytes else NO_WORK


def wire_bytes(call: Call, world_size: int) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends and receives for a call: (sent, received), both indexed by rank."""
    sent, received = [0] * world_size, [0] * world_size
    if isinstance(call.op, Collective):
        for subgroup in all_subgroups(call.op.subgroups, world_size):
            if len(subgroup) > 1:
                for rank, out, into in zip(subgroup, *call.op.rank_bytes(call, subgroup), strict=True):
                    sent[rank], received[rank] = out, into
    return sent, received


def served_bytes(call: Call, world_size: int) -> list[int]:
    """Bytes that each serving host sends for a call; it receives as many."""
    return call.op.served_bytes(call, world_size) if isinstance(call.op, Collective) else []


@lru_cache(maxsize=1 << 12)
def reduce_bytes(size: int, world_size: int, element_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes that each rank sends in the ring of gloo's reduce, and then those of its part of the sum, which it sends to
    the owner (gloo/reduce.cc); both indexed by rank.

    A value is cut into segments of at most 1 MiB, at least two a rank, the last ones shorter or empty; a rank's part is
    as many segments as any other's. In the ring a rank sends all segments but the last two of its own part: with two a
    rank this is the (n-1)/n S of a reduce-scatter; with more, gloo goes on sending segments that have no part in the
    result. [Empirical: seen on the wire for 2 to 5 ranks, `tests/lab/test_wire_bytes.py`. 0.5 to 16 MB between two and
    four hosts at 300 Mbit/s take 0.93 to 1.00 of these bytes at 0.955 of the line rate.]
    """
    segment = min(-(-size // (2 * world_size)), 2**20 // element_bytes * element_bytes)
    segment = max(1, -(-segment // element_bytes)) * element_bytes
    per_rank = -(-max(-(-size // segment), 2 * world_size) // world_size)

    def between(first: int, last: int) -> int:
        return min(size, last * segment) - min(size, first * segment)

    parts = [(r * per_rank, (r + 1) * per_rank) for r in range(world_size)]
    return tuple(size - between(end - 2, end) for _, end in parts), tuple(between(*part) for part in parts)


def broadcast_children(rank: int, world_size: int) -> list[int]:
    """The ranks that a rank sends to in gloo's binomial broadcast tree (gloo/broadcast.cc), counted from the root."""
    first = rank.bit_length()
    return [rank + (1 << i) for i in range(first, world_size.bit_length()) if rank + (1 << i) < world_size]


@lru_cache(maxsize=64)
def _children_counts(world_size: int) -> tuple[int, ...]:
    return tuple(len(broadcast_children(r, world_size)) for r in range(world_size))


def held_by_rank(call: Call, world_size: int) -> Vector:
    """Bytes of a call's value that each rank holds, by rank."""
    return call.held_by_rank(world_size).astype(float) * DTYPE_BYTES[call.dtype]


def other_ranks(subgroups: Subgroups, world_size: int) -> Vector:
    """By rank: how many other ranks there are in its subgroup."""
    found = np.zeros(world_size)
    for subgroup in all_subgroups(subgroups, world_size):
        found[list(subgroup)] = len(subgroup) - 1
    return found


def _all_but(last: int, n: int, size: int) -> Vector:
    """What each rank sends along a chain that ends with `last`."""
    sent = np.full(n, float(size))
    sent[last] = 0.0
    return sent


def collective_of(call: Call) -> Collective:
    """A call's operation as a `Collective`; the call must be of one."""
    assert isinstance(call.op, Collective), f"{call.op.name} sends nothing"
    return call.op
