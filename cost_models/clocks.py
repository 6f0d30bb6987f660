"""The compute streams of ranks that differ: how far each has come, and how long work takes beside what is in flight.

Few are advanced one after the other, in Python's numbers; many at once, in NumPy's. Both say the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from autopar.cost_models.channels import Channels
from autopar.cost_models.price import Price

Floats = npt.NDArray[np.float64]

MANY = 24
"""Number of ranks from which on NumPy is faster."""


@dataclass(frozen=True)
class Streams:
    """The compute streams: the time of the graph's nodes, summed up, for each kind of device."""

    prefix_s: Sequence[Sequence[float]]
    """[device][i]: seconds of the first i nodes."""
    device_of_rank: Sequence[int]
    backward_start: int


class Clocks(ABC):
    """The compute streams of some ranks, and how far each has come; sequences have one entry for each of these
    ranks."""

    now: Sequence[float] | Floats
    """By rank, the time until which the rank is busy, in seconds since the simulation began."""
    done_s: Sequence[float] | Floats
    """By rank, seconds of the step's work that are done, as long as they would take with nothing beside them."""

    @property
    @abstractmethod
    def earliest_s(self) -> float:
        """Of `now`."""

    @property
    @abstractmethod
    def latest_s(self) -> float:
        """Of `now`."""

    @abstractmethod
    def begin_step(self) -> None:
        """Begins a step: none of its work is done yet."""

    @abstractmethod
    def run(self, nodes: int, placed: int) -> None:
        """Advances each rank until the first `nodes` nodes of the graph and `placed` placed calls have run; transfers
        that take a part of the compute make that longer."""

    @abstractmethod
    def wait(self, until_s: float) -> None:
        """Blocks the ranks that are earlier than a time until then."""


def clocks_of(ranks: Sequence[int], streams: Streams, prices: Sequence[Price], channels: Channels) -> Clocks:
    """`prices`: of the placed calls of a step, in their order. `channels`: what is in flight."""
    return (Few if len(ranks) < MANY else Many)(ranks, streams, prices, channels)


class Few(Clocks):
    """Clocks that are advanced one rank after the other, in Python."""

    def __init__(self, ranks: Sequence[int], streams: Streams, prices: Sequence[Price], channels: Channels) -> None:
        self.ranks = ranks
        self.indices = range(len(ranks))
        self.channels = channels
        self.graph_s = [streams.prefix_s[streams.device_of_rank[r]] for r in ranks]
        own_s = [[p.first_s if p.uniform else float(p.device_s[r]) for p in prices] for r in ranks]
        self.own_s = [[*accumulate(column, initial=0.0)] for column in own_s]
        """Of the placed calls, the first so many."""
        self.now: list[float] = [0.0] * len(ranks)
        self.done_s: list[float] = [0.0] * len(ranks)
        self.stretch = [0] * len(ranks)
        """For each, the first stretch of slowed compute that may still lie ahead."""

    @property
    def earliest_s(self) -> float:
        return min(self.now)

    @property
    def latest_s(self) -> float:
        return max(self.now)

    def begin_step(self) -> None:
        self.done_s = [0.0] * len(self.ranks)

    def run(self, nodes: int, placed: int) -> None:
        now, done_s = self.now, self.done_s
        for i in self.indices:
            work_s = self.graph_s[i][nodes] + self.own_s[i][placed]
            seconds = work_s - done_s[i]
            if seconds > 0.0:
                now[i] = self._slowed(i, now[i], seconds)
                done_s[i] = work_s

    def wait(self, until_s: float) -> None:
        self.now = [t if t > until_s else until_s for t in self.now]

    def _slowed(self, i: int, now: float, seconds: float) -> float:
        """When work is done that would take `seconds` alone."""
        channels, rank = self.channels, self.ranks[i]
        stretches, passed = channels.slowed, self.stretch[i]
        while True:
            while passed < len(stretches):
                start, end, taken = stretches[passed]
                if now < end:
                    if now + seconds <= start:
                        return now + seconds
                    if now < start:
                        seconds -= start - now
                        now = start
                    speed = 1.0 - taken[rank]
                    if speed > 0.0 and (end - now) * speed >= seconds:
                        return now + seconds / speed
                    seconds -= (end - now) * speed
                    now = end
                passed += 1
                self.stretch[i] = passed
            if now < channels.now_s:  # nothing was taken since
                if now + seconds <= channels.now_s:
                    return now + seconds
                seconds -= channels.now_s - now
                now = channels.now_s
            if now < channels.next_s:
                speed = 1.0 - channels.taken[rank] if channels.taken else 1.0
                if speed > 0.0 and now + seconds / speed <= channels.next_s:
                    return now + seconds / speed
            channels.step()


class Many(Clocks):
    """Clocks of all ranks, advanced at once in NumPy."""

    def __init__(self, ranks: Sequence[int], streams: Streams, prices: Sequence[Price], channels: Channels) -> None:
        self.ranks = np.array(ranks, np.intp)
        self.channels = channels
        self.device = np.array(streams.device_of_rank)[self.ranks]
        self.graph_s = np.array(streams.prefix_s).T
        own_s = [np.zeros(len(ranks)), *(p.device_s[self.ranks] for p in prices)]
        self.own_s: Floats = np.cumsum(own_s, axis=0)
        """[placed calls, rank]: what the first so many take."""
        self.now: Floats = np.zeros(len(ranks))
        self.done_s: Floats = np.zeros(len(ranks))
        self.stretch = 0
        """The first stretch of slowed compute that may still lie ahead of a rank."""
        self._speeds: dict[int, tuple[Sequence[float], Floats]] = {}

    @property
    def earliest_s(self) -> float:
        return float(self.now.min())

    @property
    def latest_s(self) -> float:
        return float(self.now.max())

    def begin_step(self) -> None:
        self.done_s = np.zeros(len(self.ranks))

    def run(self, nodes: int, placed: int) -> None:
        work_s = self.graph_s[nodes][self.device] + self.own_s[placed]
        seconds = work_s - self.done_s
        busy = np.flatnonzero(seconds > 0.0)
        if len(busy):
            self.now[busy] = self._slowed(busy, self.now[busy], seconds[busy])
            self.done_s[busy] = work_s[busy]

    def wait(self, until_s: float) -> None:
        self.now = np.maximum(self.now, until_s)

    def _slowed(self, at: npt.NDArray[np.int64], now: Floats, seconds: Floats) -> Floats:
        """When work of the ranks `at` is done that would take `seconds` alone; entries are of these."""
        channels, stretches, full = self.channels, self.channels.slowed, np.ones(len(at))
        while self.stretch < len(stretches) and stretches[self.stretch][1] <= self.earliest_s:
            self.stretch += 1
        ends, left = now.copy(), np.ones(len(at), bool)
        """Of those whose work is not `left`, when it is done."""

        def done(which: npt.NDArray[np.bool_], speed: Floats) -> None:
            ends[which] = now[which] + seconds[which] / speed[which]
            left[which] = False

        passed = self.stretch
        while True:
            for start, end, taken in stretches[passed:]:
                done(left & (now < end) & (now + seconds <= start), full)
                inside = left & (now < end)
                waits = inside & (now < start)
                seconds = np.where(waits, seconds - (start - now), seconds)
                now = np.where(waits, start, now)
                speed = self._speed(taken)[at]
                with np.errstate(divide="ignore", invalid="ignore"):
                    done(inside & (speed > 0.0) & ((end - now) * speed >= seconds), speed)
                inside &= left
                seconds = np.where(inside, seconds - (end - now) * speed, seconds)
                now = np.where(inside, end, now)
            passed = len(stretches)
            behind = left & (now < channels.now_s)  # nothing was taken since
            done(behind & (now + seconds <= channels.now_s), full)
            behind &= left
            seconds = np.where(behind, seconds - (channels.now_s - now), seconds)
            now = np.where(behind, channels.now_s, now)
            speed = self._speed(channels.taken)[at] if channels.taken else full
            with np.errstate(divide="ignore", invalid="ignore"):
                done(left & (now < channels.next_s) & (speed > 0.0) & (now + seconds / speed <= channels.next_s), speed)
            if not left.any():
                return ends
            channels.step()

    def _speed(self, taken: Sequence[float]) -> Floats:
        """By rank: what transfers leave of its compute."""
        known = self._speeds.get(id(taken))
        if known is None:
            known = self._speeds[id(taken)] = taken, 1.0 - np.array(taken)[self.ranks]
        return known[1]
