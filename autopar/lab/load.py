"""What else a machine does while something is measured on it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Load:
    """Averages over a stretch of time, in cores. Linux only; elsewhere 0, with the load average alone."""

    others_cores: float
    """Taken by processes that are not part of what is measured. Interrupts are not counted: a lab's network runs in
    them."""
    stolen_cores: float
    """Taken by the hypervisor for other machines."""
    average: float
    """The load average over the last minute, when the stretch ended; what is measured counts in it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The machine's counters at one time."""

    at_s: float
    busy_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> Moment:
        at_s = time.monotonic()
        try:
            fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
        except OSError:
            return cls(at_s, 0.0, 0.0)
        user, nice, system, _, _, _, _, steal = (int(f) / os.sysconf("SC_CLK_TCK") for f in fields[:8])
        return cls(at_s, user + nice + system, steal)

    def until(self, later: Moment, own_s: float) -> Load:
        """The load between two moments, of which the measured processes used `own_s` of processor time."""
        elapsed_s = max(later.at_s - self.at_s, 1e-9)
        others_s = later.busy_s - self.busy_s - own_s if later.busy_s else 0.0
        average = os.getloadavg()[0]
        return Load(max(0.0, others_s) / elapsed_s, (later.stolen_s - self.stolen_s) / elapsed_s, average)
