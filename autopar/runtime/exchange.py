"""Collectives of our own, made of messages between two ranks, each in a thread of its own.

Gloo's own all-to-all sends to all ranks at once, so that all senders meet at one receiver: at 200 Mbit/s between four
hosts that took 1.77 times the bytes over the bandwidth, rounds take 1.09. Its all-gather, and its all-to-all of two
ranks, do not send and receive at the same time: 1.8 to 2.2 times at 1.5 Gbit/s between two hosts, rounds 1.0. Those of
one process group follow one another, as a round begins where the last one has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.ir.primitives import ROUNDS_BYTES

_latest: dict[str, Exchange] = {}
"""Of each channel, the exchange behind which the next one begins."""


def in_rounds(x: torch.Tensor, splits: Sequence[int]) -> bool:
    """Whether parts of `splits` elements of `x`'s dtype go in rounds; the same answer on every rank."""
    return x.device.type == "cpu" and len(splits) > 1 and max(splits) * x.element_size() > ROUNDS_BYTES


def has_failed(channel: str) -> bool:
    """Whether the last exchange of a channel has ended with an error."""
    return channel in _latest and _latest[channel]._error is not None


class Exchange(dist.Work):
    """Messages, sent and received in a thread of its own, behind those of the exchange before it on its channel. A
    subclass says what they are; `begin` starts it."""

    def __init__(self, channel: str) -> None:
        super().__init__()
        self._channel = channel
        self._error: Exception | None = None
        self._next_may_begin = threading.Event()
        self._behind = _latest.get(channel)
        self._thread = threading.Thread(target=self._run, name=f"exchange {channel}", daemon=True)

    def begin(self) -> dist.Work:
        """Starts it; returns itself."""
        _latest[self._channel] = self
        self._thread.start()
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until all was sent and received; the process group's timeout holds for each message."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            if self._behind is not None:
                self._behind._next_may_begin.wait()
                if self._behind._error is not None:
                    raise self._behind._error
            self._messages()
        except Exception as e:
            self._error = e
        finally:
            self._next_may_begin.set()
            self._behind = None
            self._forget()

    def _messages(self) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Lets go of the values."""
        raise NotImplementedError


class _Rounds(Exchange):
    """Rounds, in each of which a rank sends to one other and receives from one other."""

    def __init__(self, rank: int, pg: dist.ProcessGroup) -> None:
        super().__init__(pg.group_name)
        self._rank, self._pg = rank, pg

    def _round(self, to: int, sent: torch.Tensor, source: int, received: torch.Tensor) -> None:
        """Sends to one rank of the group and receives from one, at the same time; nothing where there is nothing."""
        works = []
        if received.numel():
            works.append(dist.irecv(received, group_src=source, group=self._pg))
        if sent.numel():
            works.append(dist.isend(sent, group_dst=to, group=self._pg))
        for work in works:
            assert work is not None
            work.wait()


class AllToAll(_Rounds):
    """Sends `sent[r]` to rank r of the group, and fills `received[r]` with what r sends; parts may be empty. In round
    k, rank r sends to rank r+k and receives from rank r-k."""

    def __init__(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int, pg: dist.ProcessGroup
    ) -> None:
        super().__init__(rank, pg)
        self._sent, self._received = sent, received

    def _messages(self) -> None:
        n = len(self._sent)
        self._received[self._rank].copy_(self._sent[self._rank])
        for k in range(1, n):
            to, source = (self._rank + k) % n, (self._rank - k) % n
            self._round(to, self._sent[to], source, self._received[source])

    def _forget(self) -> None:
        self._sent, self._received = (), ()


class AllGather(_Rounds):
    """Fills `parts[r]` with rank r's `own`. A ring: what a rank has received it sends on to the next one, so that a
    link between hosts carries each part once, however many ranks lie behind it."""

    def __init__(self, own: torch.Tensor, parts: Sequence[torch.Tensor], rank: int, pg: dist.ProcessGroup) -> None:
        super().__init__(rank, pg)
        self._own, self._parts = own, parts

    def _messages(self) -> None:
        n, rank = len(self._parts), self._rank
        self._parts[rank].copy_(self._own)
        for k in range(n - 1):
            here, before = (rank - k) % n, (rank - k - 1) % n
            self._round((rank + 1) % n, self._parts[here], (rank - 1) % n, self._parts[before])

    def _forget(self) -> None:
        self._own, self._parts = torch.empty(0), ()
