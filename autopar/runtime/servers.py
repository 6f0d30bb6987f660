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
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from autopar.errors import CollectiveError
from autopar.runtime.exchange import has_failed
from autopar.runtime.served_sum import Mesh, add_up, end

_PREFIX = "autopar/servers"
_COUNT = f"{_PREFIX}/count"
_POLL_S = 0.05
_TELL_S = 5.0
"""How long rank 0 waits for a server before it says so."""
_PATIENCE_S = 10.0
"""How long a process that serves itself waits, at its end, for other ranks to leave."""

_log = logging.getLogger("autopar")
_meshes: dict[str, Mesh] = {}
_made = itertools.count(1)


def mesh_named(name: str) -> Mesh:
    """What `join_servers` has made under that name."""
    return _meshes[name]


def join_servers(group: str, rank: int, world_size: int, servers: Sequence[str], timeout_s: float) -> str:
    """On every rank: connects the ranks of a program with its servers; returns the name of their mesh. Raises
    `CollectiveError` where a server does not come."""
    default = dist.distributed_c10d._get_default_store()
    mine = PrefixStore(f"{_PREFIX}/of/{group}", default)
    store = _root(default)
    if rank == 0:
        number = store.add(_COUNT, 1)
        spec = {"ranks": world_size, "servers": list(servers), "timeout_s": timeout_s}
        store.set(f"{_PREFIX}/{number}", json.dumps(spec))
        mine.set("number", str(number))
    number = int(mine.get("number"))
    _wait_for_all(store, number, servers, rank, timeout_s)
    mesh = _connect(store, number, rank, world_size, servers, timeout_s)
    name = f"{'+'.join(servers)} of {group} ({next(_made)})"
    _meshes[name] = mesh
    return name


def leave_servers(name: str) -> None:
    """On every rank, when its program is done: the servers' threads end."""
    mesh = _meshes.pop(name, None)
    if mesh is not None and not has_failed(name):  # else they see the connections end
        with contextlib.suppress(RuntimeError):  # the server is gone already
            end(mesh)


def _wait_for_all(store: Any, number: int, servers: Sequence[str], rank: int, timeout_s: float) -> None:
    begun, told = time.monotonic(), rank > 0
    while absent := [s for s in servers if not store.check([f"{_PREFIX}/{number}/here/{s}"])]:
        waited_s = time.monotonic() - begun
        shown = ", ".join(repr(s) for s in absent)
        command = f"run `autopar serve {store.host}:{store.port} --name {absent[0]}` there"
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


def serve(store: Any, name: str, say: Callable[[str], None], stop: threading.Event | None = None) -> None:
    """On a server: adds up for every program of the job whose cluster has a serving host of this name, until the job
    has ended, or `stop` is set and no program is left."""
    number, threads = 1, list[threading.Thread]()
    while _next_program(store, number, stop or threading.Event()):
        spec = json.loads(store.get(f"{_PREFIX}/{number}"))
        if name in spec["servers"]:
            thread = threading.Thread(target=_serve_one, args=(store.clone(), number, spec, name, say), daemon=True)
            thread.start()
            threads.append(thread)
        else:
            say(f"program {number} has no serving host '{name}', but {', '.join(map(repr, spec['servers']))}")
        number += 1
    for thread in threads:
        thread.join()


def serve_here(servers: Iterable[str]) -> None:
    """Serves in threads of this process, until the job has ended: for jobs whose hosts are all one machine."""
    store, stop = _root(dist.distributed_c10d._get_default_store()), threading.Event()
    threads = [
        threading.Thread(target=serve, args=(store.clone(), name, lambda said: None, stop), daemon=True)
        for name in servers
    ]
    for thread in threads:
        thread.start()
    # A thread must not outlive the interpreter. Finalizers run last one first: programs have left their servers.
    weakref.finalize(_serve_one, _end_of, threads, stop)


def _end_of(threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    stop.set()
    for thread in threads:
        thread.join(_PATIENCE_S)


def _next_program(store: Any, number: int, stop: threading.Event) -> bool:
    """Waits for it; False where the job has ended, or this is to stop."""
    try:
        while not store.check([f"{_PREFIX}/{number}"]):
            if stop.wait(_POLL_S):
                return False
    except dist.DistError:
        return False
    return True


def _serve_one(store: Any, number: int, spec: dict[str, Any], name: str, say: Callable[[str], None]) -> None:
    ranks, servers = spec["ranks"], spec["servers"]
    try:
        store.set(f"{_PREFIX}/{number}/here/{name}", "1")
        mesh = _connect(store, number, ranks + servers.index(name), ranks, servers, spec["timeout_s"])
        say(f"program {number}: adding up for {ranks} ranks")
        add_up(mesh)
    except RuntimeError as e:  # what gloo and the store raise
        say(f"program {number} has ended: {str(e).strip().splitlines()[0][:300]}")
    else:
        say(f"program {number} has ended")


def _root(store: Any) -> Any:
    """The store without the prefixes of process groups and of torchrun's attempts, on a connection of its own."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        raise CollectiveError(
            f"servers find a job by the address of its TCPStore, and this one meets at a {type(store).__name__}: start "
            "it with torchrun, or with init_method='env://' or 'tcp://'"
        )
    return cast(Any, store).clone()  # which the stubs of torch do not name
