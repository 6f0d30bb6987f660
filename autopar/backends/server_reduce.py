"""The sum over ranks that hosts which only serve help to make.

Everybody that adds up, a server or a rank, has its part of the value. It receives that part of every rank, piece by
piece, and sends each piece's sum back while the next one comes in; so a link is busy in both directions, and a server
needs memory for a few pieces only.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from autopar.backends.exchange import Exchange

SERVED_PIECE_BYTES = 1 << 19
"""Of a sum over serving hosts, what is added up and sent back at a time, over all that add up, while the next piece is
on its way. [Empirical: four hosts at 1 Gbit/s and two servers at 2, torch 2.13. 16 MiB take 153 ms, in pieces of 256
KiB or 1 MiB 162; an all-reduce takes 214]"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of values that can be summed; a header names one by its place here."""
END = -1
"""What stands in a header for the number of elements where there is no more to come."""
_HEADER, _ADDEND, _SUM = 1, 2, 3
"""Tags: what comes next, parts on their way to be added up, and their sums."""
AHEAD = 3
"""Pieces that may be on their way to whoever adds them up."""
_FOREVER, _FAREWELL = timedelta(days=365), timedelta(seconds=5)

Wait = Callable[[], None]

_meshes: dict[str, Mesh] = {}


def served_pieces(size: int) -> int:
    """How many pieces a served sum of so many bytes goes in."""
    return max(1, -(-size // SERVED_PIECE_BYTES), min(4, size // (SERVED_PIECE_BYTES // 8)))


def mesh_named(name: str) -> Mesh:
    """What was kept under that name."""
    return _meshes[name]


def keep_mesh(name: str, mesh: Mesh) -> None:
    """Makes a mesh known to the graphs that name it."""
    _meshes[name] = mesh


def drop_mesh(name: str) -> Mesh | None:
    """Forgets it; returns it, where there is one."""
    return _meshes.pop(name, None)


@dataclass(frozen=True)
class Mesh:
    """Ranks, and behind them the hosts that serve, each with a connection to every rank."""

    pg: Any
    """A `ProcessGroupGloo` of ranks and servers; it belongs to no default group."""
    me: int
    ranks: int
    servers: tuple[str, ...]
    """Names of the hosts that serve."""

    def send(self, x: torch.Tensor, to: int, tag: int, timeout: timedelta | None = None) -> Wait:
        """Begins to send; returns what waits for it."""
        return self._started(lambda: self.pg.send([x], to, tag), to, timeout)

    def receive(self, x: torch.Tensor, source: int, tag: int, timeout: timedelta | None = None) -> Wait:
        """Begins to receive; returns what waits for it."""
        return self._started(lambda: self.pg.recv([x], source, tag), source, timeout)

    def _started(self, start: Callable[[], dist.Work], other: int, timeout: timedelta | None) -> Wait:
        with self._named(other):  # gloo knows here already of a connection that has ended
            work = start()

        def wait() -> None:
            with self._named(other):
                work.wait() if timeout is None else work.wait(timeout)

        return wait

    @contextlib.contextmanager
    def _named(self, other: int) -> Iterator[None]:
        """Says of what fails within to whom it was."""
        try:
            yield
        except RuntimeError as e:
            cause = str(e).strip().splitlines()[0][:200]
            raise RuntimeError(f"{self.name(other)} is gone, or late, while gradients are added up: {cause}") from e

    def name(self, member: int) -> str:
        return f"rank {member}" if member < self.ranks else f"the server on host '{self.servers[member - self.ranks]}'"


class ServerSum(Exchange):
    """Sums `x` over the ranks, in place. `adds_up`: how many elements each member of the mesh adds up."""

    def __init__(self, x: torch.Tensor, adds_up: Sequence[int], mesh: Mesh) -> None:
        super().__init__(mesh)
        self._x, self._mesh = x, mesh
        self._adds_up = tuple(adds_up)
        self._ready = torch.cuda.Event() if x.is_cuda else None  # type: ignore[no-untyped-call]
        if self._ready is not None:
            self._ready.record()

    def _messages(self) -> None:
        x = self._x
        if self._ready is not None:
            self._ready.synchronize()
            x = x.cpu()
        self._sum(x)
        if self._ready is not None:
            self._x.copy_(x)
            torch.cuda.current_stream(self._x.device).synchronize()

    def _sum(self, x: torch.Tensor) -> None:
        mesh, me = self._mesh, self._mesh.me
        pieces = served_pieces(x.numel() * x.element_size())
        parts = torch.split(x, list(self._adds_up))
        for server in range(mesh.ranks, len(parts)):
            header = torch.tensor([parts[server].numel(), DTYPES.index(x.dtype), pieces])
            mesh.send(header, server, _HEADER)()
        cut = {member: _cut(part, pieces) for member, part in enumerate(parts) if part.numel() and member != me}
        own = _Adding(mesh, parts[me].numel(), x.dtype, pieces, parts[me])
        sums: list[Wait] = []
        for piece in range(pieces):
            sent = [(member, part[piece]) for member, part in cut.items() if part[piece].numel()]
            _wait_for([mesh.send(part, member, _ADDEND) for member, part in sent])
            sums += [mesh.receive(part, member, _SUM) for member, part in sent]  # what was sent may be overwritten
            own.step()
        self._pass_on()
        _wait_for(sums)
        own.finish()

    def _forget(self) -> None:
        self._x = torch.empty(0)


class _Adding:
    """Adds one member's part up, a piece at a time."""

    def __init__(
        self, mesh: Mesh, elements: int, dtype: torch.dtype, pieces: int, own: torch.Tensor | None = None
    ) -> None:
        """`own`: what this rank adds itself, and where the sum goes; None on a server."""
        self._mesh, self._own = mesh, own
        self._others = [rank for rank in range(mesh.ranks) if rank != mesh.me]
        sizes = [b - a for a, b in pairwise(_bounds(elements, pieces))]
        self._sizes: Iterator[tuple[int, int]] = iter(list(enumerate(sizes)))
        self._begins = _bounds(elements, pieces)
        self._buffers = torch.empty((AHEAD, mesh.ranks, max(sizes)), dtype=dtype)
        self._coming: deque[tuple[int, torch.Tensor, list[Wait]]] = deque()
        self._sent: deque[list[Wait]] = deque()
        for _ in range(AHEAD):
            self._expect()

    def _expect(self) -> None:
        """Is ready for the next piece, if there is one."""
        piece, size = next(self._sizes, (0, -1))
        if size < 0:
            return
        addends = self._buffers[piece % AHEAD, :, :size]
        coming = [self._mesh.receive(addends[rank], rank, _ADDEND) for rank in self._others] if size else []
        self._coming.append((piece, addends, coming))

    def step(self) -> None:
        """Adds the next piece up, once it is there, and sends its sum."""
        piece, addends, coming = self._coming.popleft()
        _wait_for(coming)
        if addends.numel():
            if self._own is not None:
                mine = self._own[self._begins[piece] : self._begins[piece + 1]]
                addends[self._mesh.me].copy_(mine)
            total = addends.sum(0, dtype=_summed_as(addends.dtype)).to(addends.dtype)
            if self._own is not None:
                mine.copy_(total)
            self._sent.append([self._mesh.send(total, rank, _SUM) for rank in self._others])
        self._expect()
        while len(self._sent) > AHEAD:
            _wait_for(self._sent.popleft())

    def finish(self) -> None:
        """Waits until all sums are with the ranks."""
        for sent in self._sent:
            _wait_for(sent)


def add_up(mesh: Mesh) -> None:
    """On a server: adds up what the ranks send, until they say that there is no more. Raises `RuntimeError` where a
    rank is gone, or where ranks differ in what they send."""
    last: _Adding | None = None
    while True:
        headers = torch.zeros((mesh.ranks, 3), dtype=torch.int64)
        _wait_for([mesh.receive(headers[rank], rank, _HEADER, _FOREVER) for rank in range(mesh.ranks)])
        if headers[0, 0] == END:
            return
        if (headers != headers[0]).any():
            raise RuntimeError(f"ranks differ in what is to be added up: {headers.tolist()}")
        elements, dtype, pieces = headers[0].tolist()
        adding = _Adding(mesh, elements, DTYPES[dtype], pieces)
        if last is not None:
            last.finish()
        for _ in range(pieces):
            adding.step()
        last = adding


def end(mesh: Mesh) -> None:
    """On a rank: tells the servers that there is no more to come."""
    for server in range(mesh.ranks, mesh.ranks + len(mesh.servers)):
        mesh.send(torch.tensor([END, 0, 0]), server, _HEADER, _FAREWELL)()


def _wait_for(all_of: Iterable[Wait]) -> None:
    for wait in all_of:
        wait()


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    """Narrow numbers are added up in float32, and rounded once."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _bounds(elements: int, pieces: int) -> list[int]:
    return [elements * i // pieces for i in range(pieces + 1)]


def _cut(part: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    return [part[a:b] for a, b in pairwise(_bounds(part.numel(), pieces))]
