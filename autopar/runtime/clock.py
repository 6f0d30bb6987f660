"""Wall time of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """Wall time until a device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._asynchronous = device.type == "cuda"

    def now(self) -> float:
        """Seconds, once all work that was given to the device has ended."""
        if self._asynchronous:
            torch.cuda.synchronize()
        return time.perf_counter()

    def of(self, work: Callable[[], object]) -> float:
        """Seconds that the work takes."""
        start = self.now()
        work()
        return self.now() - start
