"""Transfers in flight: channels that take up their transfers one after the other, and links that they share.

A channel is what begins its collectives in the order of submission: a communicator's stream, which runs one at a time,
or a process group's threads, which run as many as they are. Transfers run at the same time with those of other
channels; where a link would have to carry more than it can, all that cross it are slowed down alike, in the proportion
by which it is overfull.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from autopar.cost_models.price import Floats, Transfer

_NOTHING = 1e-12
"""What rounding leaves of a transfer that has ended: so many seconds, or so much of the time that has passed."""
_NEVER = float("inf")
CROWDED = 1.12
"""How many times as long an overfull link takes for a library's collective and one of autopar's own exchanges, each of
which waits for its messages in turn: the link stands idle while both do. Rings of 2 MB among three and four hosts took
1.08 to 1.2 times their bytes at 200 Mbit/s, 1.0 to 1.03 at 1 Gbit/s; two rings of the same kind, and rings of two, take
no longer. [Empirical]"""


@dataclass(slots=True, eq=False)
class Job:
    """A transfer that was issued."""

    index: int
    channel: Hashable
    ready_s: float
    """The time, in seconds, at which the last rank has issued the transfer."""
    transfer: Transfer
    left_s: float = 0.0
    """Seconds of the transfer that are left, as if it were alone on the network, and ranks went on as they do."""
    start_s: float | None = None


@dataclass(slots=True)
class _Channel:
    free: int
    """How many more transfers the channel could run at the same time."""
    queue: deque[Job] = field(default_factory=deque)
    """Transfers that wait for earlier ones of the channel to end."""


class Channels:
    """Evolves what is in flight, from event to event: a transfer begins, or ends. Between two events nothing changes.
    Never go beyond an event behind which something is issued that is ready before it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """When the last event was."""
        self.next_s = _NEVER
        """When the next one is, if nothing is issued before."""
        self.taken: Sequence[float] = ()
        """By rank: part of its compute that is taken between the two; empty for none."""
        self.ends: dict[int, float] = {}
        """When each transfer has ended, by its index."""
        self.done: list[tuple[Job, float]] = []
        """Transfers that have ended, and when."""
        self.slowed: list[tuple[float, float, Sequence[float]]] = []
        """Stretches before the last event in which compute is slowed down: start, end, and the part taken, by rank."""
        self._busy_s = 0.0
        self._computes = True
        self._channels: dict[Hashable, _Channel] = {}
        self._next: list[Job] = []
        """Those whose turn it is in their channels, and that are not ready yet."""
        self._active: list[Job] = []
        self._rates: Sequence[float] = ()
        """How fast each of them runs, where there are several, 1 for as fast as alone."""

    def issue(self, job: Job) -> None:
        """Puts a transfer behind the earlier ones of its channel."""
        job.left_s = job.transfer.seconds
        channel = self._channels.get(job.channel)
        if channel is None:
            channel = self._channels[job.channel] = _Channel(job.transfer.at_once)
        if channel.free:
            channel.free -= 1
            self._next.append(job)
            if job.ready_s < self.next_s:
                self.next_s = job.ready_s
        else:
            channel.queue.append(job)

    def end_of(self, index: int) -> float:
        """Evolves until a transfer has ended; returns that time in seconds."""
        while index not in self.ends:
            self.step()
        return self.ends[index]

    def finish(self) -> None:
        """Evolves until nothing is in flight."""
        while self._active or self._next:
            self.step()

    def busy_s(self, until_s: float) -> float:
        """Evolves to a time; returns how long anything was in flight before it."""
        while self.next_s <= until_s:
            self.step()
        return self._busy_s + (max(0.0, until_s - self.now_s) if self._active else 0.0)

    def compute(self, computes: bool, from_s: float) -> None:
        """Evolves to a time from which ranks compute, as they do at first, or all wait: where transfers wait for cores
        that compute, those in flight are slower until ranks wait, and faster from then on."""
        if computes == self._computes:
            return
        while self.next_s <= from_s:
            self.step()
        self._evolve(max(self.now_s, from_s))
        self._computes = computes
        for job in self._active:
            beside = 1 + job.transfer.core_wait_s / job.transfer.seconds
            job.left_s = job.left_s * beside if computes else job.left_s / beside
        self._evolve(self.now_s)

    def step(self) -> None:
        """Evolves to the next event; there must be one."""
        assert self.next_s < _NEVER, "nothing in flight, and nothing to wait for"
        self._evolve(self.next_s)

    def _evolve(self, now: float) -> None:
        """Evolves to a time before which there is no event, and finds the next one."""
        active = self._active
        passed = now - self.now_s
        if active:
            self._busy_s += passed
            if self.taken and passed > 0.0:
                self.slowed.append((self.now_s, now, self.taken))
            nothing = _NOTHING * now if now > 1.0 else _NOTHING
            if len(active) == 1:  # mostly
                (job,) = active
                job.left_s -= passed
                if job.left_s <= nothing:
                    active = []
                    self._end(job, now)
            else:
                still = []
                for job, rate in zip(active, self._rates, strict=True):
                    job.left_s -= passed * rate
                    if job.left_s > nothing:
                        still.append(job)
                    else:
                        self._end(job, now)
                active = still
        self.now_s, change = now, _NEVER
        if self._next:
            waiting = []
            for job in self._next:
                if job.ready_s <= now:
                    job.start_s = now
                    if self._computes:
                        job.left_s += job.transfer.core_wait_s
                    active.append(job)
                else:
                    waiting.append(job)
                    if job.ready_s < change:
                        change = job.ready_s
            self._next = waiting
        self._active = active
        if len(active) == 1:
            (job,) = active
            self.taken = job.transfer.taken
            end = now + job.left_s
            self.next_s = end if end < change else change
        elif active:
            self._rates, self.taken = _beside(*[job.transfer for job in active])
            self.next_s = min(change, *[now + job.left_s / rate for job, rate in zip(active, self._rates, strict=True)])
        else:
            self.taken, self.next_s = (), change

    def _end(self, job: Job, now: float) -> None:
        self.ends[job.index] = now
        self.done.append((job, now))
        channel = self._channels[job.channel]
        if channel.queue:
            self._next.append(channel.queue.popleft())
        else:
            channel.free += 1


@lru_cache(maxsize=1 << 14)  # plans of a search have most of their groups in common
def _beside(*transfers: Transfer) -> tuple[Sequence[float], Sequence[float]]:
    """Transfers beside one another: how fast each runs, 1 for as fast as alone; and the part of its compute that they
    take together, by rank, empty for none."""
    takers = [t.taken for t in transfers if t.taken]
    taken = np.minimum(1.0, np.sum(takers, axis=0)).tolist() if takers else []
    totals = transfers[0].loads
    for transfer in transfers[1:]:
        totals = totals + transfer.loads
    most = float(totals.max(initial=0.0))
    if most > 1 and len({t.at_once for t in transfers if t.in_turn}) > 1:
        totals = totals * CROWDED
        most *= CROWDED
    alternating = _by_channel(transfers)
    if most <= 1 and not alternating:
        return [1.0] * len(transfers), taken
    fullest = int(totals.argmax())
    rates = [1 / max(1.0, most) if t.loads[fullest] > 0 else _rate(t.loads, totals) for t in transfers]
    return [min(r, 1 / alternating.get(t.channel, 1.0)) for r, t in zip(rates, transfers, strict=True)], taken


def _rate(loads: Floats, totals: Floats) -> float:
    """By the fullest of the links that a transfer fills."""
    return 1 / max(1.0, float(totals[loads > 0].max(initial=1.0)))


def _by_channel(transfers: Sequence[Transfer]) -> dict[Hashable, float]:
    """How many times as long transfers take that share a connection with others of their channel."""
    held: dict[Hashable, float] = {}
    for t in transfers:
        if t.connection:
            held[t.channel] = held.get(t.channel, 0.0) + t.connection
    return {channel: part for channel, part in held.items() if part > 1}
