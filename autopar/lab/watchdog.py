"""The process that waits for the end of an owner and removes what it has left; started by `autopar.lab.guard`."""

from __future__ import annotations

import select
import signal
import time

from autopar.lab.guard import carries
from autopar.lab.namespaces import namespaces_of, remove
from autopar.lab.processes import kill_all

_CLEAN_LOOKS = 4
_PAUSE_S = 0.05


def watch_over(handle: int, owner: int, mark: str) -> None:
    """Waits for the process behind `handle` to end; then kills what carries `mark` and removes the namespaces of
    `owner`. Returns when nothing was found a few times in a row: a process that the owner was just about to start
    may show itself late."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    waiting.poll()
    looks = 0
    while looks < _CLEAN_LOOKS:
        looks = 0 if sweep(owner, mark) else looks + 1
        time.sleep(_PAUSE_S)


def sweep(owner: int, mark: str) -> bool:
    """Removes what is left of an owner; returns whether there was anything."""
    # Processes first: among them may be a command that is still adding a namespace.
    killed = kill_all(lambda pid: carries(mark, pid))
    names = namespaces_of(owner)
    remove(names)
    return bool(killed or names)
