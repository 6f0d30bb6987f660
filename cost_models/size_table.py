"""What something takes, by its size: a few measured points, and what lies between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Seconds by size, a straight line in logarithms between neighbouring points.

    On 14,336 measured NCCL all-reduces, six points predict the others within 2.5 % on average, where a latency and a
    bandwidth fitted to them err by up to 74 % below 16 MB (`python -m benchmarks.fidelity --only nccl`).
    """

    sizes: tuple[float, ...]
    """Ascending; of one kind, bytes or elements."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a table needs as many sizes as times, and one at least, got {len(self.sizes)} sizes")
        if min(self.sizes) <= 0 or min(self.seconds) <= 0:
            raise ValueError("sizes and times must be greater than 0")
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"sizes must ascend, got {self.sizes}")

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> SizeTable:
        """From points in any order; where a size was measured several times, the median holds."""
        found: dict[float, list[float]] = {}
        for size, seconds in points:
            found.setdefault(size, []).append(seconds)
        return cls(tuple(sorted(found)), tuple(median(found[size]) for size in sorted(found)))

    def at(self, size: float) -> float:
        """Seconds for a size. Below the smallest point, as long as that takes: fixed costs decide there. Above the
        largest, each further unit takes what it took between the last two points, on average."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        i = bisect_left(self.sizes, size)
        if i == len(self.sizes):
            return self.seconds[-1] + (size - self.sizes[-1]) * self._last_slope()
        (a, s), (b, t) = ((self.sizes[j], self.seconds[j]) for j in (i - 1, i))
        part = math.log(size / a) / math.log(b / a)
        return s * float((t / s) ** part)

    def _last_slope(self) -> float:
        if len(self.sizes) == 1:
            return self.seconds[0] / self.sizes[0]
        (a, b), (s, t) = self.sizes[-2:], self.seconds[-2:]
        return max(0.0, (t - s) / (b - a))
