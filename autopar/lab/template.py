"""The process that ranks of a job are forked from; started by `autopar.lab.forks`.

It imports the module that ranks run once, however many they are: PyTorch with TorchDynamo takes seconds of a core. Then
it forks a process for each rank. On what was its standard output each says which process it is, and the template how
each has ended, in lines of JSON.
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
from typing import Any

from autopar.lab.forks import Fork

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MNT_DETACH, _MS_RDONLY, _MS_REC, _MS_SLAVE = 0x2, 0x1, 0x4000, 0x80000
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def main() -> None:
    """Imports the module that the arguments name, and forks ranks as standard input says; in each, calls its `main`
    with the arguments behind it."""
    pipe = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)  # what is imported may print
    module = importlib.import_module(sys.argv[1])
    forks = [Fork(**told) for told in json.loads(_line())]
    gc.collect()
    gc.freeze()  # or the first collection in each rank would copy the pages of all that was imported
    sys.stdout.flush()
    ranks: dict[int, int] = {}
    for rank, fork in enumerate(forks):
        pid = os.fork()
        if pid == 0:
            os.setsid()  # a session of its own, as of one that was started by itself
            _say(pipe, {"rank": rank, "pid": os.getpid()})  # the rank says so itself, before it can answer
            os.close(pipe)
            _become(fork, forks)
            sys.argv = sys.argv[1:]
            module.main()
            return
        ranks[pid] = rank
    for fork in forks:
        os.close(fork.stdin)
        os.close(fork.answers)
    while ranks:
        pid, status = os.wait()
        if pid in ranks:  # or what was imported has started it
            _say(pipe, {"rank": ranks.pop(pid), "exit_status": os.waitstatus_to_exitcode(status)})


def _line() -> bytes:
    """What standard input says, up to the end of the line; Python keeps nothing of it back, as ranks have another."""
    found = b""
    while not found.endswith(b"\n"):
        chunk = os.read(_STDIN, 1 << 16)
        if not chunk:
            sys.exit("nobody says what to fork")
        found += chunk
    return found


def _say(pipe: int, value: dict[str, int]) -> None:
    os.write(pipe, json.dumps(value).encode() + b"\n")


def _become(fork: Fork, all_forks: Sequence[Fork]) -> None:
    """Makes this process a rank: with files, an environment, a network and cores of its own."""
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
    if "numpy.random" in sys.modules:  # Python's own generator does so by itself
        sys.modules["numpy.random"].seed()


def _enter(namespace: str) -> None:
    """Has this process, which has one thread, use a network namespace from now on, and see it in /sys, as under `ip
    netns exec`; see setns(2) and mount_namespaces(7)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *args: Any) -> None:
        if getattr(libc, function)(*args) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter the network namespace: {function}: {os.strerror(error)}", namespace)

    handle = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    call("setns", handle, _CLONE_NEWNET)
    os.close(handle)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"", b"/", b"none", ctypes.c_ulong(_MS_SLAVE | _MS_REC), None)  # others do not see what follows
    as_before = _MS_RDONLY if os.statvfs("/sys").f_flag & os.ST_RDONLY else 0
    libc.umount2(b"/sys", _MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(as_before), None)


if __name__ == "__main__":
    main()
