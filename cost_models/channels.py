"""Transfers in flight: channels that take up their transfers one after the other, and links that they share.

A channel is what begins its collectives in the order of submission: a communicator's stream, which runs one at a time,
or a process group's threads, which run as many as they are. Transfers run at the same time with those of other
channels; where a link would have to carry more than it can, all that cross it are slowed down alike, in the proportion
by which it is overfull.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

_NOTHING_S = 1e-12
"""What rounding leaves of a transfer that has ended."""


@dataclass
class Job:
    """A transfer that was issued."""

    index: int
    channel: Hashable
    ready_s: float
    """When the last rank has issued it."""
    left_s: float
    """Of its time alone on the network."""
    loads: Sequence[float]
    """Part of each link, and of what hosts can move, that it fills while it is alone."""
    taken: Sequence[float]
    """Part of its compute that it takes from each compute stream; empty for none."""
    at_once: int = 1
    """Transfers that its channel runs at the same time; alike for all of a channel."""
    start_s: float | None = None


class Channels:
    """Evolves what is in flight, as far as it is asked to. Never ask for a time behind which something is issued."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy_s = 0.0
        """How long anything was in flight."""
        self.ends: dict[int, float] = {}
        """When each transfer has ended, by its index."""
        self.done: list[tuple[Job, float]] = []
        """Transfers that have ended, and when."""
        self.slowed: list[tuple[float, float, Sequence[float]]] = []
        """Stretches of time in which compute is slowed down: start, end, and the part taken of each stream."""
        self._queues: dict[Hashable, deque[Job]] = {}
        self._now: tuple[list[Job], list[float], float] | None = None
        """What is known of the present, until it changes."""

    def issue(self, job: Job) -> None:
        """Puts a transfer behind those of its channel."""
        self._queues.setdefault(job.channel, deque()).append(job)
        self._now = None

    def end_of(self, index: int) -> float:
        """Evolves until a transfer has ended; returns when."""
        while index not in self.ends:
            self._step(float("inf"))
        return self.ends[index]

    def finish(self) -> None:
        """Evolves until nothing is in flight."""
        while any(self._queues.values()):
            self._step(float("inf"))

    def advance(self, until_s: float) -> None:
        """Evolves to a time."""
        while self.now_s < until_s:
            self._step(until_s)

    def to_next_event(self) -> None:
        """Evolves until a transfer begins or ends; there must be one that does."""
        self._step(float("inf"))

    def quiet_until(self) -> float:
        """When the next transfer begins or ends, if nothing is issued before; infinity where none does."""
        return self._ahead()[2]

    def taken(self) -> Sequence[float]:
        """Part of its compute that is taken from each compute stream at present; empty for none."""
        return _together([job.taken for job in self._ahead()[0] if job.taken])

    def _ahead(self) -> tuple[list[Job], list[float], float]:
        """What is in flight, how fast each runs, and when that changes."""
        if self._now is None:
            active, begins = [], float("inf")
            for queue in self._queues.values():
                for job in islice(queue, queue[0].at_once) if queue else ():
                    if job.ready_s <= self.now_s:
                        active.append(job)
                    else:
                        begins = min(begins, job.ready_s)
            rates = _rates(active)
            for job, rate in zip(active, rates, strict=True):
                begins = min(begins, self.now_s + job.left_s / rate)
            self._now = active, rates, begins
        return self._now

    def _step(self, until_s: float) -> None:
        """To the next event: a transfer begins or ends, or the time is reached."""
        active, rates, change = self._ahead()
        stop = min(change, until_s)
        assert stop < float("inf"), "nothing in flight, and nothing to wait for"
        if active:
            step = stop - self.now_s
            self.busy_s += step
            self._slow(active, stop)
            for job, rate in zip(active, rates, strict=True):
                if job.start_s is None:
                    job.start_s = self.now_s
                job.left_s -= step * rate
                if job.left_s <= _NOTHING_S:
                    self._queues[job.channel].remove(job)
                    self.ends[job.index] = stop
                    self.done.append((job, stop))
        self.now_s = stop
        self._now = None

    def _slow(self, active: Sequence[Job], stop: float) -> None:
        taken = _together([job.taken for job in active if job.taken])
        if taken and stop > self.now_s:
            self.slowed.append((self.now_s, stop, taken))


def _together(takers: Sequence[Sequence[float]]) -> Sequence[float]:
    if len(takers) < 2:
        return takers[0] if takers else ()
    return [min(1.0, sum(parts)) for parts in zip(*takers, strict=True)]


def _rates(active: Sequence[Job]) -> list[float]:
    """How fast each transfer runs beside the others, 1 for as fast as alone."""
    if len(active) < 2:
        return [1.0] * len(active)
    totals = [sum(parts) for parts in zip(*(j.loads for j in active), strict=True)]
    return [
        min((1 / t for load, t in zip(j.loads, totals, strict=True) if t > 1 and load > 0), default=1.0) for j in active
    ]
