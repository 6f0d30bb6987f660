"""The primitives that strategies are made of, and the record of one step that they form.

A strategy says what it does once, by emitting primitives. The record is read twice: the runtime writes it
into the FX graph, the cost model prices it. So a cost cannot drift from what is executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

Teams = tuple[tuple[int, ...], ...]
"""Disjoint sets of ranks that together are all ranks, each of which does a collective among itself; empty for one team
of all."""


def all_teams(teams: Teams, world_size: int) -> Teams:
    """The same, with the one team of all where none are named."""
    return teams or (tuple(range(world_size)),)


ROUNDS_BYTES = 64 * 1024
"""Of an exchange, parts up to here fit the buffers on their way, so that sending all at once costs nothing; larger ones
go in rounds (`autopar.runtime.exchange`)."""
EXACT_BYTES = 4
"""Numbers of so many bytes may be added to on their way from rank to rank; smaller ones would be rounded each time."""
LARGE_BYTES = 1 << 25
"""From here on, CPUs form what works `in_pieces` make a few rows at a time: glibc gives memory of this size back to the
system at once, and every new page costs."""
SERVED_PIECE_BYTES = 1 << 19
"""Of a sum over serving hosts, what is added up and sent back at a time, over all that add up, while the next piece is
on its way. [Empirical: four hosts at 1 Gbit/s and two servers at 2, torch 2.13. 16 MiB take 153 ms, in pieces of 256
KiB or 1 MiB 162; an all-reduce takes 214]"""
DTYPE_BYTES = {
    "complex128": 16,
    "complex64": 8,
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
}


class Kind(StrEnum):
    """What a primitive does. Collectives are over all ranks, or within teams, and return at once; `WAIT` completes
    them."""

    PACK = "pack"
    """Flatten, concatenate and cast the group's gradients, as soon as the last of them is complete."""
    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    """Sum to `owner`."""
    REDUCE_SCATTER = "reduce_scatter"
    """Sum; rank r keeps `splits[r]` elements, in rank order."""
    ALL_GATHER = "all_gather"
    """Concatenate every rank's `splits[r]` elements."""
    BROADCAST = "broadcast"
    """Send from `owner` to all."""
    ALL_TO_ALL = "all_to_all"
    """Send to each rank the part that is meant for it; the batch decides how much. `splits[r]` elements of rank r, of
    which each rank gets an equal share, are expected."""
    SERVED_SUM = "served_sum"
    """Sum, for all: each rank and each serving host adds up its part, `summed_by`, and sends it to every rank."""
    COUNT = "count"
    """How many rows the parts of each gradient have on this rank, once equal ones are merged."""
    PARTS = "parts"
    """What the group's gradients are made of on this rank, as one flat value: rows of tables, factors of products."""
    FORM = "form"
    """The group's gradients, from the parts of all ranks."""
    LOCAL = "local"
    """Other work of a strategy's own, named by `work`."""
    LET_GO = "let_go"
    """Nobody reads so many elements of its input behind it. Nothing is done: a graph lets go of what is not read."""
    WAIT = "wait"
    UPDATE = "update"
    """The optimizer, on the elements that this rank holds. Its value is the updated parameters, same layout."""
    DELIVER = "deliver"
    """Hand the synchronized gradient over to `parameter.grad` (a program without an optimizer)."""
    STORE = "store"
    """Write received parameter values into the parameters."""
    CLIP = "clip"
    """The clipping coefficient, from the global norm over all its inputs; one small sum where some are sharded."""


COLLECTIVES = frozenset(
    {
        Kind.ALL_REDUCE,
        Kind.REDUCE,
        Kind.REDUCE_SCATTER,
        Kind.ALL_GATHER,
        Kind.BROADCAST,
        Kind.ALL_TO_ALL,
        Kind.SERVED_SUM,
    }
)


@dataclass(frozen=True, slots=True)
class Primitive:
    """One step of a lowered strategy."""

    index: int
    """Its place in the record; `inputs` refers to it."""
    kind: Kind
    group: int
    """Index of the sync group; `WHOLE_STEP` where it belongs to none."""
    inputs: tuple[int, ...]
    elements: int
    """Of the whole flat value, over all ranks."""
    dtype: str
    """Of the value, as it lies in memory and on the wire."""
    stage: int
    """0: as soon as its inputs are there, beside the backward pass. s > 0: after the backward pass, behind the
    s-th wait of its group. Stages from `CLIP_STAGE` on also lie behind the global gradient norm. `FORWARD_STAGE`: as
    soon as its inputs are there, beside the forward pass; one more: between the two passes."""
    splits: tuple[int, ...] = ()
    """Elements that each rank holds, where the value is sharded."""
    owner: int | None = None
    """The one rank that holds the value, where one does."""
    teams: Teams = ()
    """Of a collective."""
    summed_by: tuple[int, ...] = ()
    """`SERVED_SUM`: elements that each rank adds up, and behind those each serving host, in the cluster's order."""
    lane: int = 0
    """Of a collective: lanes have channels of their own, so what one sends does not wait for the other."""
    flops: int = 0
    """Operations on the device, of `COUNT`, `PARTS` and `FORM`."""
    moved_bytes: int = 0
    """Bytes read and written by them; expected ones, where they depend on the batch."""
    ragged: bool = False
    """Whether `elements` and `splits` are only expected: the batch decides, and ranks may differ."""
    work: str = ""
    """Of `LOCAL`: what is done; `autopar.runtime` knows it by this name."""
    position: int | None = None
    """The position in the graph's compute behind which it runs, where `stage` does not say it."""
    resident: bool = False
    """`UPDATE`: of rows that nobody else holds between steps either: rank r has rows r, r+n, r+2n, ... of its group's
    parameters."""
    late: bool = False
    """Of a collective, its `WAIT` and its `STORE`: begun as one step ends, and completed in the next one, behind the
    `position` of the latter two."""
    touched: int | None = None
    """`UPDATE`: how many elements it is expected to touch, where it passes over the others."""
    in_pieces: bool = False
    """`LOCAL`: whether its value, where it is large, is formed only as it is used (`autopar.runtime.products`)."""
    in_place: bool = False
    """`LOCAL`: its value takes the place of its first input."""

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def spread(self) -> bool:
        """Whether no two ranks hold the same element."""
        return bool(self.splits) or self.owner is not None

    def held_elements(self, rank: int) -> int:
        """Elements of the value that `rank` holds."""
        if self.splits:
            return self.splits[rank]
        if self.owner is not None and self.kind is not Kind.BROADCAST:
            return self.elements if rank == self.owner else 0
        return self.elements

    def team_of(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The ranks among which `rank` does the collective, itself included."""
        return next(t for t in all_teams(self.teams, world_size) if rank in t)


GATHERED = "shards."
"""What the works of parameters are called that are gathered from the ranks which keep their rows."""
WHOLE_STEP = -1
FORWARD_STAGE = -2
CLIP_STAGE = 100


def alike(splits: Sequence[int]) -> bool:
    """Whether parts differ by one element at most: then they may go around in a ring, without the slow waiting for the
    fast."""
    return max(splits) - min(splits) <= 1


def wire_bytes(primitive: Primitive, world_size: int) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends and receives for a primitive: (sent, received), both indexed by rank.

    The formulas are those of the algorithms that run (gloo's, and those of `runtime.collectives`); `tests/lab` holds
    them to the bytes seen on the wire. n ranks in a team, S bytes in all, s_r of them held by rank r:

    ==============  ========================================  ==========================================
    primitive       sent by a rank                            received by a rank
    ==============  ========================================  ==========================================
    all-reduce      2 (n-1)/n S: a ring                       2 (n-1)/n S
    reduce          R + S/n; the owner R: a ring's            R; the owner R + (n-1)/n S
                    reduce-scatter, then parts to the owner
    broadcast       S for each child in a binomial tree       S; the owner nothing
    reduce-scatter  S - s_r: to each rank its part            (n-1) s_r
    all-gather      (n-1) s_r                                 S - s_r
    all-to-all      (n-1)/n s_r                               (S - s_r)/n
    served sum      S - s_r to those that add up, and         (n-1) s_r, and S - s_r
                    (n-1) s_r of what it adds up
    ==============  ========================================  ==========================================

    Of a served sum, s_r is what rank r adds up; a serving host that adds up s receives, and sends, n s. R is
    `ring_reduce_bytes`: (n-1)/n S for small values, nearly S for large ones.
    """
    sent, received = [0] * world_size, [0] * world_size
    if primitive.kind not in COLLECTIVES:
        return sent, received
    for team in all_teams(primitive.teams, world_size):
        for rank, out, into in zip(team, *_team_bytes(primitive, team), strict=True):
            sent[rank], received[rank] = out, into
    return sent, received


def _team_bytes(primitive: Primitive, team: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """As `wire_bytes`, by place in the team."""
    n, size, width = len(team), primitive.bytes, DTYPE_BYTES[primitive.dtype]
    if n == 1:
        return [0], [0]
    if primitive.kind is Kind.ALL_REDUCE:
        ring = [2 * round((n - 1) / n * primitive.held_elements(r) * width) for r in team]
        return ring, ring
    if primitive.kind is Kind.REDUCE:
        ring_bytes, part = ring_reduce_bytes(size, n), round((n - 1) / n * size)
        return (
            [ring_bytes if r == primitive.owner else ring_bytes + size // n for r in team],
            [ring_bytes + part if r == primitive.owner else ring_bytes for r in team],
        )
    if primitive.kind is Kind.BROADCAST:
        assert primitive.owner is not None
        root = team.index(primitive.owner)
        children = [len(broadcast_children((i - root) % n, n)) for i in range(n)]
        return [c * size for c in children], [0 if r == primitive.owner else size for r in team]
    if primitive.kind is Kind.ALL_TO_ALL:
        held = [primitive.splits[r] * width for r in team]
        return [h - h // n for h in held], [(size - h) // n for h in held]
    if primitive.kind is Kind.SERVED_SUM:
        moved = [size + (n - 2) * primitive.summed_by[r] * width for r in team]
        return moved, moved
    rest = [size - primitive.splits[r] * width for r in team]
    share = [(n - 1) * primitive.splits[r] * width for r in team]
    return (rest, share) if primitive.kind is Kind.REDUCE_SCATTER else (share, rest)


def served_bytes(primitive: Primitive, world_size: int) -> list[int]:
    """Bytes that each host which serves sends for a primitive; it receives as many."""
    return [world_size * e * DTYPE_BYTES[primitive.dtype] for e in primitive.summed_by[world_size:]]


def ring_reduce_bytes(size: int, world_size: int) -> int:
    """Bytes that each rank sends in the ring of gloo's reduce (gloo/reduce.cc): all segments but two.

    A value is cut into at least two segments a rank, of at most 1 MiB. With two a rank this is the (n-1)/n S of a
    reduce-scatter; with more, gloo goes on sending segments that have no part in the result. [Empirical: seen on the
    wire for 2 to 5 ranks; `tests/lab/test_wire_bytes.py`.]
    """
    segments = max(-(-size // 2**20), 2 * world_size)
    segments = -(-segments // world_size) * world_size
    return round(size * (segments - 2) / segments)


def served_pieces(size: int) -> int:
    """How many pieces a served sum of so many bytes goes in."""
    return max(1, -(-size // SERVED_PIECE_BYTES), min(4, size // (SERVED_PIECE_BYTES // 8)))


def broadcast_children(rank: int, world_size: int) -> list[int]:
    """The ranks that a rank sends to in gloo's binomial broadcast tree (gloo/broadcast.cc), counted from the root."""
    first = rank.bit_length()
    return [rank + (1 << i) for i in range(first, world_size.bit_length()) if rank + (1 << i) < world_size]


def order_hash(primitives: tuple[Primitive, ...], world_size: int) -> str:
    """A hash over the collectives in issue order: what all ranks must agree on before the first step."""
    lines = [
        f"{p.kind} ragged {p.dtype}"
        if p.ragged
        else f"{p.kind} {p.elements} {p.dtype} {p.splits} {p.owner} {p.teams} {p.lane}"
        for p in primitives
        if p.kind in COLLECTIVES
    ]
    return hashlib.sha256("\n".join([str(world_size), *lines]).encode()).hexdigest()[:16]
