"""Labs that stand until they are taken down: each is kept by a small detached process, its owner.

`start` begins one and returns when the lab is up; `standing` finds those that there are, by their command line, so
that no file can be out of date; `stop` ends one. A keeper is an owner like any other: its lab goes with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.lab.processes import all_processes, start_time

if TYPE_CHECKING:
    from autopar.lab.cluster import Lab
    from autopar.spec.cluster import ClusterSpec

_ROOT = Path(__file__).resolve().parents[2]
_MODULE = "autopar.lab.keeper"
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class StandingHost:
    """One host of a lab that stands."""

    name: str
    namespace: str
    address: str
    ranks: tuple[int, ...]
    sends_bps: float | None
    """None for as fast as it goes."""
    receives_bps: float | None


@dataclass(frozen=True, slots=True)
class Keeper:
    """A process that keeps a lab."""

    pid: int
    name: str
    """Of the lab, as the user calls it."""


def standing() -> list[Keeper]:
    """The keepers that there are."""
    keepers = []
    for pid in all_processes():
        with suppress(OSError):
            argv = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
            if argv[1:-1] == ["-m", _MODULE]:
                keepers.append(Keeper(pid, argv[-1]))
    return sorted(keepers, key=lambda keeper: keeper.name)


def start(name: str, cluster: ClusterSpec, scale: float = 1.0) -> tuple[StandingHost, ...]:
    """Brings up a lab that stands until `stop`; returns its hosts.

    Raises what `Lab.of` and `Lab.up` raise. Where this process ends before it has returned, there is no lab.
    """
    from autopar.lab.namespaces import LabUnavailable, unavailable_reason
    from autopar.lab.wiring import of_cluster

    of_cluster(cluster, scale)
    reason = unavailable_reason()
    if reason is not None:
        raise LabUnavailable(reason)
    # Its stderr is not this process's, which somebody may read to the end.
    with subprocess.Popen(
        [sys.executable, "-m", _MODULE, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd="/",
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"cluster": cluster.to_yaml(), "scale": scale}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"error": "its keeper ended without a word"}')
        if "error" in answer:
            raise LabUnavailable(f"the lab could not be brought up: {answer['error']}")
        process.stdin.write("keep\n")
    return tuple(StandingHost(**{**host, "ranks": tuple(host["ranks"])}) for host in answer["hosts"])


def stop(keeper: Keeper) -> None:
    """Ends a keeper and waits until its lab is gone."""
    from autopar.lab.namespaces import namespaces_of

    deadline = time.monotonic() + _PATIENCE_S
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(keeper.pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            if not select.select([handle], [], [], _PATIENCE_S / 2)[0]:
                signal.pidfd_send_signal(handle, signal.SIGKILL)  # Its watchdog does the rest.
        finally:
            os.close(handle)
    while namespaces_of(keeper.pid) or start_time(keeper.pid) is not None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"lab '{keeper.name}' is still there {_PATIENCE_S:g} s after its keeper was ended")
        time.sleep(0.02)


def keep() -> None:
    """The keeper itself: detaches, reads what to bring up, says on stdout what there is, and waits for SIGTERM."""
    if os.fork():
        os._exit(0)
    from autopar.lab.cluster import Lab
    from autopar.spec.cluster import ClusterSpec

    try:
        request = json.loads(sys.stdin.readline())
        with Lab.of(ClusterSpec.loads(request["cluster"]), scale=request["scale"]) as lab:
            _say({"hosts": [asdict(host) for host in _describe(lab)]})
            if sys.stdin.readline() != "keep\n":
                return  # Who asked is gone.
            while True:
                signal.pause()
    except Exception as e:
        _say({"error": f"{type(e).__name__}: {e}"})


def _describe(lab: Lab) -> list[StandingHost]:
    return [
        StandingHost(
            host.name,
            str(host.namespace),
            host.address,
            tuple(rank for rank, at in enumerate(lab.ranks) if at == host),
            lab.wiring.sends_bps(host.name),
            lab.wiring.receives_bps(host.name),
        )
        for host in lab.hosts
    ]


def _say(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(dict(value)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    keep()
