"""What a calibration says of collectives that were not measured themselves: other sizes, other owners, other shares.

The flows of a collective, and so its time by the cluster's figures, are known for any message. A calibration says how
far these times are off for even messages of a few sizes. What lies between is taken from straight lines in logarithms,
and what is smaller is off by as much as the smallest; what is larger takes as much longer than the largest as the
formula says, times what that was off by between the last two sizes. So a link that is slower than its data sheet, a
library that reaches less of it, or processors that cannot keep up are found once, and hold for every message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from autopar.cost_models.price import Floats
from autopar.ops.base import Call
from autopar.ops.collectives import collective_of, wire_bytes
from autopar.ops.measured import collective_named
from autopar.ops.subgroups import Subgroups
from autopar.spec.calibration import Calibration, CollectiveTimes

T = TypeVar("T")

SLOPES = (0.5, 3.0)
"""Between these lies how much longer than computed a further byte takes: two times that were measured may be off."""
FASTER = 0.95
"""And no less than so much of what it is for an all-reduce, which says how fast the links are: buffers and bursts hold
some megabytes, so that what was measured up to there may look faster than the links are."""
WIDTH = 4
"""Bytes of one number of a measured message, which is float32."""


@dataclass(frozen=True)
class _Table:
    """One collective among the same subgroups."""

    sizes: tuple[float, ...]
    """Logarithms of the measured messages' bytes, ascending."""
    factors: tuple[float, ...]
    """By size, the logarithm of measured over computed seconds."""
    largest_s: tuple[float, float]
    """Measured and computed seconds of the largest message."""
    slope: float
    """Measured over computed, of what the largest size takes longer than the one before it."""

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        measured_s: Sequence[float],
        computed_s: Sequence[float],
        slopes: tuple[float, float] = SLOPES,
    ) -> _Table:
        """`slopes`: those between which that of larger messages lies."""
        slope, (least, most) = 1.0, slopes
        if len(sizes) > 1:
            slope = (measured_s[-1] - measured_s[-2]) / max(computed_s[-1] - computed_s[-2], 1e-12)
        return cls(
            tuple(math.log(size) for size in sizes),
            tuple(math.log(m / c) for m, c in zip(measured_s, computed_s, strict=True)),
            (measured_s[-1], computed_s[-1]),
            min(max(slope, least), most),
        )

    def seconds(self, size_bytes: int, computed_s: float) -> float:
        """Seconds of a message that would take `computed_s` by the cluster's figures."""
        size = math.log(max(1, size_bytes))
        measured_s, largest_s = self.largest_s
        if size > self.sizes[-1] and computed_s > largest_s:
            return measured_s + self.slope * (computed_s - largest_s)
        return computed_s * math.exp(float(np.interp(size, self.sizes, self.factors)))


class Calibrated:
    """Times of collectives as a calibration has them, from those that the cluster's figures give."""

    def __init__(
        self,
        calibration: Calibration,
        world_size: int,
        computed_s: Callable[[Call], tuple[float, float]],
        rates: Sequence[float],
        path: Callable[[int, int], Sequence[int]],
    ) -> None:
        """By the cluster's figures: `computed_s`, seconds of a collective, and those of a rank's processor, on
        average; `rates`, bytes per second of each link; `path`, those links that lie between two ranks."""
        self._world_size = world_size
        self._reached = [0.0] * len(rates)
        """How much of its rate a message over each link was measured to reach; 0 where none was."""
        for way in calibration.links:
            over = path(way.sender, way.receiver)
            part = way.bytes_per_s / min((rates[link] for link in over), default=math.inf)
            for link in over:
                self._reached[link] = max(self._reached[link], part)
        self._faster_links = max([1.0, *self._reached])
        """By how much some link is faster than the figures say."""
        self._tables: dict[tuple[str, Subgroups], _Table] = {}
        self._processor: dict[tuple[str, Subgroups], _Table] = {}
        self._core_wait_s: dict[tuple[str, Subgroups], float] = {
            (times.kind, times.teams): times.core_wait_s for times in calibration.collectives
        }
        least = SLOPES[0]
        for times in sorted(calibration.collectives, key=lambda t: (t.kind != "all_reduce", bool(t.teams))):
            found = [computed_s(measured(times, size, world_size)) for size in times.size_bytes]
            computed, processor_s = zip(*found, strict=True)
            table = _Table.of(times.size_bytes, times.seconds, computed, (least, SLOPES[1]))
            if (times.kind, times.teams) == ("all_reduce", ()):
                least = FASTER * table.slope
            self._tables[times.kind, times.teams] = table
            if all(processor_s) and all(times.processor_s):
                # The difference of two processor times is too unsteady to go on with: what is larger is as the largest.
                as_largest = times.processor_s[-1] / processor_s[-1]
                self._processor[times.kind, times.teams] = _Table.of(
                    times.size_bytes, times.processor_s, processor_s, (as_largest, as_largest)
                )

    def seconds(self, call: Call, computed_s: float, wire_s: float) -> float:
        """Of a collective that would take `computed_s`, of which its bytes take `wire_s` on the fullest link: what was
        measured may have been slow for another reason, and tells of links only by how fast they were. Subgroups that
        were not measured are taken for all ranks together, collectives that were not for an all-reduce."""
        table = _nearest(self._tables, call)
        if table is None:
            return computed_s
        return max(FASTER * wire_s / self._faster_links, table.seconds(self._size_bytes(call), computed_s))

    def processor_times(self, call: Call, computed_s: float) -> float:
        """Processor time that a collective takes on a rank, in multiples of `computed_s`, seconds that the cluster's
        figures give."""
        table = _nearest(self._processor, call)
        if table is None or computed_s <= 0:
            return 1.0
        return table.seconds(self._size_bytes(call), computed_s) / computed_s

    def core_wait_s(self, call: Call) -> float:
        """Seconds that a collective takes longer where ranks compute all the while."""
        return _nearest(self._core_wait_s, call) or 0.0

    def _size_bytes(self, call: Call) -> int:
        return collective_of(call).size_bytes(call, self._world_size)

    def loads(self, computed: Floats, longer: float) -> Floats:
        """Parts of links, and of what hosts can move, that a collective fills which takes so many times `longer` than
        computed. If links are as fast as the figures say, it waits for something else, and leaves room on them for
        others; none on processors that move its bytes, as it may be they that it waits for."""
        links = len(self._reached)
        reached = np.array(self._reached)
        filled = np.minimum(1.0, computed[:links] / longer / np.where(reached > 0, reached, 1.0))
        return np.append(np.where(reached > 0, filled, computed[:links]), computed[links:])


def _nearest(tables: Mapping[tuple[str, Subgroups], T], call: Call) -> T | None:
    """What is known of a collective among its subgroups; else among all ranks; else that of an all-reduce."""
    op = collective_of(call)
    keys = ((op.name, op.subgroups), (op.name, ()), ("all_reduce", ()))
    return next((tables[key] for key in keys if key in tables), None)


def host_bytes_per_s(calibration: Calibration, world_size: int) -> float | None:
    """Bytes, sent and received together, that one processor core moves: the median over large messages."""
    found = []
    for times in calibration.collectives:
        for size, seconds in zip(times.size_bytes, times.processor_s, strict=True):
            if size >= 1 << 20 and seconds > 0:
                sent, received = wire_bytes(measured(times, size, world_size), world_size)
                found.append((sum(sent) + sum(received)) / world_size / seconds)
    return median(found) if found else None


def measured(times: CollectiveTimes, size_bytes: int, world_size: int) -> Call:
    """What was measured at a size: even shares, and rank 0 as the owner where there is one."""
    return collective_named(times.kind, size_bytes // WIDTH, world_size, times.teams)
