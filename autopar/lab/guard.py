"""Nothing outlives its owner: a watchdog for each process that starts hosts or ranks.

Whatever a lab starts carries a mark in its environment, which its children inherit. Before the first of it, the owner
starts a small detached process (`autopar.lab.watchdog`) that waits for the owner's end, of whatever kind, and then
kills what carries the mark and removes the owner's namespaces. It holds a handle of the owner's process, so it can
neither miss its end nor mistake another process for it.

On Linux only, from 5.3 on; elsewhere there is no watchdog, and what a killed owner started runs on.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

from autopar.lab.processes import above_streams, environment_of, start_time

MARK = "AUTOPAR_LAB_MARKS"
"""The environment variable: the marks of a process, from the outermost owner's to its own."""

_serial = itertools.count()
_ROOT = Path(__file__).resolve().parents[2]
# It detaches itself, as a child of the owner would have to be waited for, and Ctrl-C would reach it.
_START = """
import os, sys
sys.path.insert(0, sys.argv[1])
from autopar.lab.watchdog import watch_over
if os.fork():
    os._exit(0)
os.setsid()
watch_over(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


def marked_environment(*more: str) -> dict[str, str]:
    """The environment of this process with its mark, and `more` of them, for what it starts."""
    marks = [*filter(None, [os.environ.get(MARK)]), _mark(os.getpid()), *more]
    return {**os.environ, MARK: ",".join(marks)}


def new_mark() -> str:
    """A mark of its own for some of what this process starts."""
    return f"{_mark(os.getpid())}/{next(_serial)}"


def carries(mark: str, pid: int) -> bool:
    """Whether a process carries a mark."""
    return mark in environment_of(pid).get(MARK, "").split(",")


def watch() -> None:
    """Starts this process's watchdog, where it has none. To be called before anything is left to it."""
    _watch(os.getpid())


@functools.cache
def _mark(pid: int) -> str:
    return f"{pid}:{start_time(pid)}"


@functools.cache
def _watch(owner: int) -> None:
    try:
        handle = above_streams(os.pidfd_open(owner))
    except (AttributeError, OSError):  # Not Linux, or before 5.3.
        return
    try:
        # Without the mark, so that it is not what it kills; -I and -S for a quick start: it needs no other package,
        # and fails here where that is not so any more.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _START, str(_ROOT), str(handle), str(owner), _mark(owner)],
            env=environment,
            cwd="/",
            pass_fds=(handle,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    finally:
        os.close(handle)
