"""How fast the machine is at the moment: its speed varies by itself."""

from __future__ import annotations

import time

ADDITIONS = 100_000


def additions_us() -> float:
    """What 100,000 additions in Python take, in microseconds: the fastest of three, as others may come between."""

    def once() -> float:
        start, x = time.perf_counter(), 0
        for i in range(ADDITIONS):
            x += i
        return 1e6 * (time.perf_counter() - start)

    return round(min(once() for _ in range(3)))
