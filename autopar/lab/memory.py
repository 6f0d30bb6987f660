"""The memory of a living process: what it holds at most between two moments (Linux)."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Sets the peak to what is resident now; see proc(5), clear_refs."""


def release() -> None:
    """Gives what is free back to the system, so that a process that lives on starts the next piece of work lean."""
    gc.collect()
    with suppress(OSError, AttributeError):  # Not the GNU C library.
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """From here on, `peak_bytes` is counted anew."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def resident_bytes() -> int:
    """What is resident now; 0 where this is not Linux."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """What was resident at most since `reset_peak`; where that cannot be reset, since the process began.

    Linux's `VmHWM` rather than `ru_maxrss`, which a new process inherits from the one that started it.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    return 0
