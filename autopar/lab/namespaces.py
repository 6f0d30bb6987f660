"""The names of network namespaces, and how they are removed; whether this machine can have them.

Names carry the process id of the owner and a number (`autopar-4711-0-worker-2`), so that labs can stand side by side,
and so that `cleanup_stale` can remove what was left behind where not even a watchdog was spared.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from autopar.errors import AutoparError
from autopar.lab import guard
from autopar.lab.build import shaping
from autopar.lab.host import shell
from autopar.lab.processes import identity, kill_all, network_of, start_time

_FOLDER = Path("/run/netns")
_NAME = re.compile(r"autopar-(\d+)-\d+-[\w.-]+")
_serial = itertools.count()


class LabUnavailable(AutoparError, RuntimeError):
    """This machine cannot bring up network namespaces; the message says why."""


def new_prefix() -> str:
    """The beginning of the names of a new lab of this process."""
    return f"autopar-{os.getpid()}-{next(_serial)}"


@functools.cache
def unavailable_reason() -> str | None:
    """Why this machine cannot bring up a lab, or None where it can. Tries each kind of device once."""
    if platform.system() != "Linux":
        return f"network namespaces need Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "bridge") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    guard.watch()
    prefix = new_prefix()
    try:
        shell(f"ip netns add {prefix}-probe")
        shell(f"ip -n {prefix}-probe link add name port type veth peer name eth0")
        shell(f"ip -n {prefix}-probe link add name switch type bridge")
        shell(f"tc -n {prefix}-probe {shaping('eth0', 1e9)}")
        if not lab_namespaces(prefix):
            return f"`ip netns` keeps its namespaces elsewhere than in {_FOLDER}"
    except RuntimeError as e:
        return f"this machine does not allow it: {e}"
    finally:
        remove(lab_namespaces(prefix))
    return None


def cleanup_stale() -> list[str]:
    """Removes the labs, with their processes, whose owner is dead; returns the names of what it removed."""
    stale = [name for owner, name in _owned() if start_time(owner) is None]
    remove(stale)
    return stale


def lab_namespaces(prefix: str) -> list[str]:
    """The namespaces of one lab."""
    return [name for _, name in _owned() if name.startswith(f"{prefix}-")]


def namespaces_of(owner: int) -> list[str]:
    """The namespaces of all labs of a process."""
    return [name for pid, name in _owned() if pid == owner]


def _owned() -> Iterator[tuple[int, str]]:
    with suppress(FileNotFoundError):
        for path in sorted(_FOLDER.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match:
                yield int(match[1]), path.name


def remove(namespaces: Collection[str]) -> None:
    """Removes namespaces and kills what runs in them. Another process may be at it, too."""
    networks = {identity(_FOLDER / name) for name in namespaces} - {None}
    if networks:
        kill_all(lambda pid: network_of(pid) in networks)
    for name in namespaces:
        with suppress(RuntimeError):
            shell(f"ip netns delete {name}")
    # Again, as one may have entered in between; into what has no name any more, nobody does. First and not only now,
    # as after an interrupt the names are what tells others that there is something left.
    if networks:
        kill_all(lambda pid: network_of(pid) in networks)
