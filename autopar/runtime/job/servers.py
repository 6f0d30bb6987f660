"""Where ranks and the hosts that serve them meet: at the store of the job.

A server is a process on a host without devices, `autopar serve`. It reads from the job's store which programs are
there, and adds up for each of them, in a thread, until the program ends or a rank is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from autopar.backends.exchange import has_failed
from autopar.backends.server_reduce import Mesh, add_up, drop_mesh, end, keep_mesh
from autopar.errors import CollectiveError
from autopar.runtime.job.meeting import attempt
from autopar.runtime.job.store import JobStore, StoreFailure, StoreSilent

if TYPE_CHECKING:
    from autopar.runtime.job.presence import Presence

_PREFIX = "autopar/servers"
_POLL_S = 0.05
_TELL_S = 5.0
"""How long rank 0 waits for a server before it says so."""
_PATIENCE_S = 10.0
"""How long a process that serves itself waits, at its end, for other ranks to leave."""
_SILENT_S = 5.0
_MOST_MEMBERS, _MOST_TIMEOUT_S = 1 << 16, 1e8
"""Of what a program may ask a server for."""

_log = logging.getLogger("autopar")
_made = itertools.count(1)


def join_servers(group: str, presence: Presence, servers: Sequence[str], timeout_s: float) -> str:
    """On every rank: connects the ranks of a program with its servers; returns the name of their mesh. Raises
    `CollectiveError` where a server, or a rank, does not come."""
    store = presence.connect("reaching the store", _own_root, timeout_s)
    asked = JobStore(store, _PREFIX, timeout_s)
    with presence.asking(f"rank {presence.rank} meets the servers"):
        number = _number(asked, presence, group, servers, timeout_s)
        _wait_for_all(asked, f"{store.host}:{store.port}", number, servers, presence.rank, timeout_s)
    ranks = presence.world_size
    mesh = presence.connect(
        "connecting ranks and servers",
        lambda: _connect(store, number, presence.rank, ranks, servers, timeout_s),
        timeout_s,
    )
    name = f"{'+'.join(servers)} of {group} ({next(_made)})"
    keep_mesh(name, mesh)
    return name


def _number(asked: JobStore, presence: Presence, group: str, servers: Sequence[str], timeout_s: float) -> int:
    """The number under which servers find the program: rank 0 takes the first that is free."""
    key, ranks = f"of/{attempt()}/{group}", presence.world_size
    if presence.rank == 0:
        number = next(n for n in itertools.count(1) if not asked.check(str(n)))
        asked.set(str(number), json.dumps({"ranks": ranks, "servers": list(servers), "timeout_s": timeout_s}))
        asked.set(key, str(number))
        return number

    def is_there(within_s: float) -> bool:
        if asked.check(key):
            return True
        time.sleep(within_s)
        return False

    here = f"rank {presence.rank} waited for the number of its program"
    presence.wait_for(here, is_there, [0], timeout_s)
    return asked.read(key, asked.get(key) or "", int)


def leave_servers(name: str) -> None:
    """On every rank, when its program is done: the servers' threads end."""
    mesh = drop_mesh(name)
    if mesh is not None and not has_failed(mesh):  # else they see the connections end
        with contextlib.suppress(RuntimeError):  # the server is gone already
            end(mesh)


def _wait_for_all(
    asked: JobStore, address: str, number: int, servers: Sequence[str], rank: int, timeout_s: float
) -> None:
    begun, told = time.monotonic(), rank > 0
    while absent := [s for s in servers if not asked.check(f"{number}/here/{s}")]:
        waited_s = time.monotonic() - begun
        shown = ", ".join(repr(s) for s in absent)
        command = f"run `autopar serve {address} --name {absent[0]}` there"
        if waited_s > timeout_s:
            raise CollectiveError(
                f"the plan has gradients added up on host {shown}, where no server has come within {timeout_s:g} s: "
                f"{command}"
            )
        if waited_s > _TELL_S and not told:
            told = True
            _log.warning("waiting for a server on host %s, which is to add gradients up: %s", shown, command)
        time.sleep(_POLL_S)


def _connect(store: Any, number: int, me: int, ranks: int, servers: Sequence[str], timeout_s: float) -> Mesh:
    meeting = PrefixStore(f"{_PREFIX}/{number}/gloo", store)
    pg = dist.ProcessGroupGloo(meeting, me, ranks + len(servers), timedelta(seconds=timeout_s))
    return Mesh(pg, me, ranks, tuple(servers))


@dataclass(frozen=True)
class _Spec:
    """A program that is to be served, as its rank 0 describes it."""

    ranks: int
    servers: tuple[str, ...]
    timeout_s: float

    @classmethod
    def of(cls, text: str) -> _Spec:
        """Raises `ValueError`, or another error of what Python does with values, where rank 0 has not written it."""
        found = json.loads(text)
        ranks, servers, timeout_s = found["ranks"], found["servers"], float(found["timeout_s"])
        if not (isinstance(ranks, int) and 0 < ranks <= _MOST_MEMBERS and 0 < timeout_s <= _MOST_TIMEOUT_S):
            raise ValueError("a number out of bounds")
        if not (
            isinstance(servers, list) and len(servers) <= _MOST_MEMBERS and all(isinstance(s, str) for s in servers)
        ):
            raise ValueError("servers are a list of names")
        return cls(ranks, tuple(servers), timeout_s)


class Serving:
    """What a server does: it adds up for every program of a job whose cluster has a serving host of its name."""

    def __init__(self, store: Any, name: str, say: Callable[[str], None]) -> None:
        """`store`: the job's, of torch, on a connection that nothing else waits on."""
        self._store, self.name, self._say = store, name, say
        self._asked = JobStore(store, _PREFIX, _SILENT_S)
        self._threads: list[threading.Thread] = []
        self.programs = 0
        """How many programs it has added up for."""

    def run(self, stop: threading.Event) -> None:
        """Serves until the job has ended, or `stop` is set; then until no program is left."""
        number = 1
        while self._wait_for_program(number, stop):
            self._begin(number)
            number += 1
        for thread in self._threads:
            thread.join()

    def _wait_for_program(self, number: int, stop: threading.Event) -> bool:
        """False where the job has ended, or this is to stop."""
        while not stop.is_set():
            try:
                if self._asked.check(str(number)):
                    return True
            except StoreSilent:  # frozen, it may go on
                pass
            except StoreFailure:
                return False
            stop.wait(_POLL_S)
        return False

    def _begin(self, number: int) -> None:
        try:
            spec = self._asked.read(str(number), self._asked.get(str(number)) or "", _Spec.of)
        except (CollectiveError, StoreFailure) as e:
            self._say(f"program {number} cannot be served: {e}")
            return
        if self.name not in spec.servers:
            self._say(f"program {number} has no serving host '{self.name}', but {', '.join(map(repr, spec.servers))}")
            return
        thread = threading.Thread(target=self._serve, args=(number, spec), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self, number: int, spec: _Spec) -> None:
        try:
            store = self._store.clone()
            store.set(f"{_PREFIX}/{number}/here/{self.name}", "1")
            me = spec.ranks + spec.servers.index(self.name)
            mesh = _connect(store, number, me, spec.ranks, spec.servers, spec.timeout_s)
            self._say(f"program {number}: adding up for {spec.ranks} ranks")
            self.programs += 1
            add_up(mesh)
        except Exception as e:  # ranks, or those who pose as such, may send anything
            self._say(f"program {number} has ended: {(str(e).strip() or type(e).__name__).splitlines()[0][:300]}")
        else:
            self._say(f"program {number} has ended")


def serve_here(servers: Iterable[str]) -> None:
    """Serves in threads of this process, until the job has ended: for jobs whose hosts are all one machine."""
    store, stop = _own_root(), threading.Event()
    threads = [
        threading.Thread(target=Serving(store.clone(), name, lambda said: None).run, args=(stop,), daemon=True)
        for name in servers
    ]
    for thread in threads:
        thread.start()
    # A thread must not outlive the interpreter. Finalizers run last one first: programs have left their servers.
    weakref.finalize(_own_root, _end_of, threads, stop)


def _end_of(threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    stop.set()
    for thread in threads:
        thread.join(_PATIENCE_S)


def _own_root() -> Any:
    """The default group's store without the prefixes of process groups, on a connection of its own."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        raise CollectiveError(
            f"servers find a job by the address of its TCPStore, and this one meets at a {type(store).__name__}: start "
            "it with torchrun, or with init_method='env://' or 'tcp://'"
        )
    return cast(Any, store).clone()  # which the stubs of torch do not name
