"""The process that a job's ranks are forked from; started by `autopar.lab.forks`.

It imports the module that ranks run once, however many they are: PyTorch with TorchDynamo takes seconds of a core. Then
it forks a process for each rank, and says on its standard output which it has forked and how each has ended, in lines
of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autopar.lab.forks import Fork

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def main() -> None:
    """Imports the module that the arguments name, and forks ranks as standard input says; in each, calls its `main`
    with the arguments behind it."""
    module = importlib.import_module(sys.argv[1])
    forks = [Fork(**told) for told in json.loads(_line())]
    gc.collect()
    gc.freeze()  # or the first collection in each rank would copy the pages of all that was imported
    ranks: dict[int, int] = {}
    for rank, fork in enumerate(forks):
        pid = os.fork()
        if pid == 0:
            _become(fork, forks)
            sys.argv = sys.argv[1:]
            module.main()
            return
        ranks[pid] = rank
        _say({"rank": rank, "pid": pid})
    for fork in forks:
        os.close(fork.stdin)
        os.close(fork.answers)
    while ranks:
        pid, status = os.wait()
        _say({"rank": ranks.pop(pid), "exit_status": os.waitstatus_to_exitcode(status)})


def _line() -> bytes:
    """What standard input says, up to the end of the line; Python keeps nothing of it back, as ranks have another."""
    found = b""
    while not found.endswith(b"\n"):
        chunk = os.read(_STDIN, 1 << 16)
        if not chunk:
            sys.exit("nobody says what to fork")
        found += chunk
    return found


def _say(value: dict[str, int]) -> None:
    os.write(_STDOUT, json.dumps(value).encode() + b"\n")


def _become(fork: Fork, all_forks: Sequence[Fork]) -> None:
    """Makes this process a rank: in a session of its own, as one that was started by itself."""
    os.setsid()
    for path, to in ((fork.stdout, _STDOUT), (fork.stderr, _STDERR)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, to)
        os.close(opened)
    os.dup2(fork.stdin, _STDIN)
    for other in all_forks:
        os.close(other.stdin)
        if other is not fork:  # or its reader would not see the end of what that rank says
            os.close(other.answers)
    os.environ.update(fork.environment)
    if fork.namespace is not None:
        _enter(fork.namespace)
    if fork.cores:
        os.sched_setaffinity(0, fork.cores)


def _enter(namespace: str) -> None:
    """Has this process, which has one thread, use a network namespace from now on; see setns(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter the network namespace: {os.strerror(error)}", namespace)
    finally:
        os.close(handle)


if __name__ == "__main__":
    main()
