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
from operator import add

_NOTHING_S = 1e-12
"""What rounding leaves of a transfer that has ended."""
_ALONE = (1.0,)


@dataclass(slots=True)
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
    """Evolves what is in flight, from event to event: a transfer begins, or ends. Between two events nothing changes.
    Never go beyond an event behind which something is issued that is ready before it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """When the last event was."""
        self.next_s = float("inf")
        """When the next one is, if nothing is issued before."""
        self.taken: Sequence[float] = ()
        """Part of its compute that is taken from each compute stream between the two; empty for none."""
        self.ends: dict[int, float] = {}
        """When each transfer has ended, by its index."""
        self.done: list[tuple[Job, float]] = []
        """Transfers that have ended, and when."""
        self.slowed: list[tuple[float, float, Sequence[float]]] = []
        """Stretches before the last event in which compute is slowed down: start, end, and the part taken of each
        stream."""
        self._busy_s = 0.0
        self._queues: dict[Hashable, deque[Job]] = {}
        self._active: list[Job] = []
        self._rates: Sequence[float] = ()

    def issue(self, job: Job) -> None:
        """Puts a transfer behind those of its channel."""
        queue = self._queues.get(job.channel)
        if queue is None:
            queue = self._queues[job.channel] = deque()
        queue.append(job)
        if len(queue) <= job.at_once and job.ready_s < self.next_s:
            self.next_s = job.ready_s

    def end_of(self, index: int) -> float:
        """Evolves until a transfer has ended; returns when."""
        while index not in self.ends:
            self.step()
        return self.ends[index]

    def finish(self) -> None:
        """Evolves until nothing is in flight."""
        while any(self._queues.values()):
            self.step()

    def busy_s(self, until_s: float) -> float:
        """Evolves to a time; returns how long anything was in flight before it."""
        while self.next_s <= until_s:
            self.step()
        return self._busy_s + (max(0.0, until_s - self.now_s) if self._active else 0.0)

    def step(self) -> None:
        """To the next event; there must be one."""
        stop, passed = self.next_s, self.next_s - self.now_s
        assert stop < float("inf"), "nothing in flight, and nothing to wait for"
        if self._active:
            self._busy_s += passed
            if self.taken and passed > 0.0:
                self.slowed.append((self.now_s, stop, self.taken))
            for job, rate in zip(self._active, self._rates, strict=True):
                job.left_s -= passed * rate
                if job.left_s <= _NOTHING_S:
                    self._queues[job.channel].remove(job)
                    self.ends[job.index] = stop
                    self.done.append((job, stop))
        self.now_s = stop
        self._look_ahead()

    def _look_ahead(self) -> None:
        """What is in flight from now on, how fast each runs, and when that changes."""
        now, change = self.now_s, float("inf")
        active: list[Job] = []
        for queue in self._queues.values():
            for job in islice(queue, queue[0].at_once) if queue else ():
                if job.ready_s <= now:
                    active.append(job)
                    if job.start_s is None:
                        job.start_s = now
                elif job.ready_s < change:
                    change = job.ready_s
        self._active = active
        if len(active) == 1:  # mostly
            alone = active[0]
            self._rates, self.taken = _ALONE, alone.taken
            self.next_s = min(change, now + alone.left_s)
            return
        self._rates = _rates(active)
        for job, rate in zip(active, self._rates, strict=True):
            change = min(change, now + job.left_s / rate)
        self.next_s = change
        self.taken = _together([job.taken for job in active if job.taken])


def _together(takers: Sequence[Sequence[float]]) -> Sequence[float]:
    if len(takers) < 2:
        return takers[0] if takers else ()
    return [min(1.0, sum(parts)) for parts in zip(*takers, strict=True)]


def _rates(active: Sequence[Job]) -> list[float]:
    """How fast each transfer runs beside the others, 1 for as fast as alone."""
    if not active:
        return []
    totals = list(active[0].loads)
    for job in active[1:]:
        totals = list(map(add, totals, job.loads))
    most = max(totals, default=0.0)
    if most <= 1:
        return [1.0] * len(active)
    fullest = totals.index(most)
    return [1 / most if j.loads[fullest] > 0 else _rate(j.loads, totals) for j in active]


def _rate(loads: Sequence[float], totals: Sequence[float]) -> float:
    """By the fullest of the links that a transfer fills."""
    return min((1 / t for load, t in zip(loads, totals, strict=True) if t > 1 and load > 0), default=1.0)
