"""Which processes there are, and an end to those that belong to a lab (Linux)."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_PAUSE_S = 0.01


def all_processes() -> Iterator[int]:
    """The ids of all processes, this one left out. None where there is no /proc."""
    with suppress(FileNotFoundError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                yield int(entry.name)


def kill_all(belongs: Callable[[int], bool], patience_s: float = 10.0) -> list[int]:
    """Kills every process that `belongs` says yes to, those that appear meanwhile too; returns the ids of the killed.

    Returns when none is left, or after `patience_s` where the kernel does not let go of one.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + patience_s
    while True:
        found = [pid for pid in all_processes() if _kill(pid, belongs)]
        killed.update(found)
        if not found or time.monotonic() > deadline:
            return sorted(killed)
        time.sleep(_PAUSE_S)


def _kill(pid: int, belongs: Callable[[int], bool]) -> bool:
    """Whether the process belonged, and has been killed."""
    with suppress(OSError):  # It has ended meanwhile, or is another user's.
        handle = _handle(pid)
        try:
            if belongs(pid):
                if handle is None:
                    os.kill(pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            if handle is not None:
                os.close(handle)
    return False


def _handle(pid: int) -> int | None:
    """What stays with this process, even where its number is given to another one; None before Linux 5.3."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def network_of(pid: int | str) -> tuple[int, int] | None:
    """The identity of a process's network namespace; None where it has ended, or is another user's."""
    return identity(Path(f"/proc/{pid}/ns/net"))


def identity(path: Path) -> tuple[int, int] | None:
    """What tells the file behind a path from all others, such as a namespace; None where there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it has ended, or is another user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def above_streams(fd: int) -> int:
    """The same file under a number that is none of the standard streams', as `fd` is where this process has none of
    these: a child that is given one for itself would lose it. `fd` is closed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since the machine did: with its id it names the process for good.

    None where there is no such process, or where it has ended and nobody has asked for its exit status yet.
    """
    try:
        # The name of the program, in brackets, may itself hold blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
