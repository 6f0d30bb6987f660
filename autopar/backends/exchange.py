"""Collectives of our own, made of messages between two ranks, each in a thread of its own while it runs.

Gloo's own all-to-all sends to all ranks at once, so that all senders meet at one receiver: at 200 Mbit/s between four
hosts that took 1.77 times the bytes over the bandwidth, rounds take 1.09, a ring 1.05. Its all-gather, and its
all-to-all of two ranks, do not send and receive at the same time: 1.8 to 2.2 times at 1.5 Gbit/s between two hosts,
rounds 1.0. Those of one process group follow one another, each behind what the one before it sends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

ROUNDS_BYTES = 64 * 1024
"""Of an exchange, parts up to here fit the buffers on their way, so that sending all at once costs nothing; larger ones
go in rounds."""
PIECES, PIECE_BYTES = 4, 1 << 19
"""Of what goes around a ring, the most pieces, and how small they may be."""


@dataclass(eq=False)
class _Turn:
    """What an exchange leaves to the one behind it."""

    passed_on: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


_latest: WeakKeyDictionary[object, _Turn] = WeakKeyDictionary()
"""Of each channel, the turn behind which the next exchange begins. A process group made anew under an old name is
another channel: it has nothing to do with what failed on the old one."""


def in_rounds(x: torch.Tensor, splits: Sequence[int]) -> bool:
    """Whether parts of `splits` elements of `x`'s dtype go in rounds; the same answer on every rank."""
    return x.device.type == "cpu" and len(splits) > 1 and max(splits) * x.element_size() > ROUNDS_BYTES


def alike(sizes: Sequence[int]) -> bool:
    """Whether parts differ by one element at most: then they may go around a ring, without the slow waiting for the
    fast."""
    return max(sizes) - min(sizes) <= 1


def has_failed(channel: object) -> bool:
    """Whether the last exchange of a channel has ended with an error."""
    return channel in _latest and _latest[channel].error is not None


class Exchange(dist.Work):
    """Messages, sent and received in a thread of its own, behind those of the exchange before it on its channel: a
    process group, or what else holds the connections. A subclass says what they are; `begin` starts it."""

    def __init__(self, channel: object) -> None:
        super().__init__()
        self._channel = channel
        self._turn = _Turn()
        self._behind: _Turn | None = None
        self._ended = threading.Event()

    def begin(self) -> dist.Work:
        """Starts it; returns itself."""
        self._line_up()
        _Worker.idle().runs.put(self._run)
        return self

    def _line_up(self) -> None:
        """Behind what was begun before it on its channel."""
        self._behind = _latest.get(self._channel)
        _latest[self._channel] = self._turn

    def is_completed(self) -> bool:
        """Whether all was sent and received, or it has failed."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until all was sent and received; the process group's timeout holds for each message."""
        self._ended.wait()
        if self._turn.error is not None:
            raise self._turn.error
        return True

    def _run(self) -> None:
        try:
            if self._behind is not None:
                self._behind.passed_on.wait()
                if self._behind.error is not None:
                    raise self._behind.error
            self._messages()
        except Exception as e:
            self._turn.error = e
        finally:
            self._pass_on()
            self._behind = None
            self._forget()
            self._ended.set()

    def _messages(self) -> None:
        """Sends and receives. May call `_pass_on` once all is sent, and what it waits for is asked for."""
        raise NotImplementedError

    def _pass_on(self) -> None:
        """Lets the exchange behind this one begin."""
        self._turn.passed_on.set()

    def _forget(self) -> None:
        """Lets go of the values."""
        raise NotImplementedError


class _Worker(threading.Thread):
    """A thread that runs one exchange after the other. Who begins one waits for each thread to start: where ranks keep
    all cores busy, 1 ms, and nothing with one that waits for work. [Empirical]"""

    _waiting: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        super().__init__(name="exchange", daemon=True)
        self.runs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    @classmethod
    def idle(cls) -> _Worker:
        """One that waits for work; a new one where all have some."""
        try:
            return cls._waiting.pop()
        except IndexError:
            worker = cls()
            worker.start()
            return worker

    @classmethod
    def forget(cls) -> None:
        """In a process that was forked: the others' threads are not here."""
        cls._waiting.clear()

    def run(self) -> None:
        while True:
            self.runs.get()()
            self._waiting.append(self)


os.register_at_fork(after_in_child=_Worker.forget)


class Messages(Exchange):
    """Messages between the ranks of a process group; a subclass says which, in `_messages`."""

    def __init__(self, rank: int, pg: dist.ProcessGroup) -> None:
        super().__init__(pg)
        self._rank, self._pg = rank, pg

    def _receive(self, piece: torch.Tensor, source: int, tag: int = 0) -> dist.Work | None:
        return dist.irecv(piece, group_src=source, group=self._pg, tag=tag) if piece.numel() else None

    def _send(self, piece: torch.Tensor, to: int, tag: int = 0) -> dist.Work | None:
        return dist.isend(piece, group_dst=to, group=self._pg, tag=tag) if piece.numel() else None


class AllToAll(Messages):
    """Sends `sent[r]` to rank r of the group, and fills `received[r]` with what r sends; parts may be empty. Rank r
    sends to rank r+1, then to r+2, and so on, so that no two of equal speed meet; a slow receiver holds up those alone
    that send to it."""

    def __init__(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int, pg: dist.ProcessGroup
    ) -> None:
        super().__init__(rank, pg)
        self._sent, self._received = sent, received

    def _messages(self) -> None:
        n = len(self._sent)
        self._received[self._rank].copy_(self._sent[self._rank])
        others = [(self._rank + k) % n for k in range(1, n)]
        awaited = [self._receive(self._received[r], r) for r in reversed(others)]
        for r in others:
            _wait(self._send(self._sent[r], r))
        self._pass_on()
        for work in awaited:
            _wait(work)

    def _forget(self) -> None:
        self._sent, self._received = (), ()


class _Ring(Messages):
    """Rounds in which a rank sends to the next one what it had from the one before."""

    def _around(self, first: torch.Tensor, into: Sequence[torch.Tensor], added: Sequence[torch.Tensor] = ()) -> None:
        """Sends `first`, receives `into` one after the other, adds to each what is `added`, and sends all but the last
        on. In pieces, so that one is on its way while another is added to."""
        n = self._pg.size()
        to, source = (self._rank + 1) % n, (self._rank - 1) % n
        count = max(1, min(PIECES, max(x.numel() * x.element_size() for x in (first, *into)) // PIECE_BYTES))
        awaited = [
            [(piece, self._receive(piece, source, count * k + i)) for i, piece in enumerate(x.tensor_split(count))]
            for k, x in enumerate(into)
        ]
        sent = [self._send(piece, to, i) for i, piece in enumerate(first.tensor_split(count))]
        for k, pieces in enumerate(awaited):
            own = added[k].tensor_split(count) if added else ()
            for i, (piece, work) in enumerate(pieces):
                _wait(work)
                if own:
                    piece += own[i]
                if k + 1 < len(awaited):
                    sent.append(self._send(piece, to, count * (k + 1) + i))
        for work in sent:
            _wait(work)


class AllGather(_Ring):
    """Fills `parts[r]` with rank r's `own`. What a rank has received it sends on, so that a link between hosts carries
    each part once, however many ranks lie behind it."""

    def __init__(self, own: torch.Tensor, parts: Sequence[torch.Tensor], rank: int, pg: dist.ProcessGroup) -> None:
        super().__init__(rank, pg)
        self._own, self._parts = own, parts

    def _messages(self) -> None:
        n, rank = len(self._parts), self._rank
        self._parts[rank].copy_(self._own)
        self._around(self._parts[rank], [self._parts[(rank - k) % n] for k in range(1, n)])

    def _forget(self) -> None:
        self._own, self._parts = torch.empty(0), ()


class ReduceScatter(_Ring):
    """Fills `out` with the sum of what all ranks have as `parts[r]` for this rank r. The part of a rank begins behind
    it, at the next one, and grows on its way around."""

    def __init__(self, parts: Sequence[torch.Tensor], out: torch.Tensor, rank: int, pg: dist.ProcessGroup) -> None:
        super().__init__(rank, pg)
        self._parts, self._out = parts, out

    def _messages(self) -> None:
        n, rank = len(self._parts), self._rank
        added = [self._parts[(rank - k) % n] for k in range(2, n + 1)]
        into = [torch.empty_like(part) for part in added[:-1]]
        self._around(self._parts[(rank - 1) % n], [*into, self._out], added)

    def _forget(self) -> None:
        self._parts, self._out = (), torch.empty(0)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
