"""A rank whose memory is measured: it trains a workload for a few steps, by a plan or as a peer does."""

from __future__ import annotations

import threading
import time
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from autopar.backends import collectives
from autopar.backends.exchange import Exchange
from autopar.lab.memory import peak_bytes, release, reset_peak, resident_bytes
from benchmarks.interleaved import serve_requests
from benchmarks.peers import Options, peer_named
from benchmarks.peers.planned import captured
from benchmarks.suite import workload_named

STEPS = 2
"""That are looked at, behind one that makes the optimizer's state."""
MOMENT_S = 0.005


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"workload", "peer", "options"}`: the most that was allocated during a step, and the most that was resident
    beyond what was resident before there was a model."""
    captured(workload_named(request["workload"]))
    release()
    before = resident_bytes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        begin_ns, resident = _train(request["workload"], request["peer"], request["options"])
    return {"allocated_bytes": _most(profiler, begin_ns), "resident_bytes": resident - before}


def _train(name: str, peer: str, options: Options) -> tuple[int, int]:
    """When the steps began that are looked at, and what was resident at most during them."""
    workload, rank, n = workload_named(name), dist.get_rank(), dist.get_world_size()
    batches = [pytree.tree_map(_own, workload.batch(number, rank)) for number in range(1 + STEPS)]
    step = peer_named(peer).build(workload, rank, n, options)
    step(batches[0])
    release()
    reset_peak()
    begin_ns = time.time_ns()
    for batch in batches[1:]:
        step(batch)
    return begin_ns, peak_bytes()


def _free_where_it_is_seen() -> None:
    """The profiler sees what its own thread frees. So what an exchange has sent is freed as a step waits for it, which
    is a little later than it is freed without this; and a wait gives gloo's threads the time to let go."""
    run, wait = Exchange._run, Exchange.wait

    def run_and_keep(self: Any) -> None:
        self._forget = lambda: None
        run(self)

    def wait_and_forget(self: Any, timeout: Any = None) -> bool:
        done = wait(self, timeout)
        if threading.current_thread() is threading.main_thread():
            type(self)._forget(self)
        return done

    Exchange._run, Exchange.wait = run_and_keep, wait_and_forget  # type: ignore[method-assign]
    wait_for = collectives.wait

    def and_a_moment(x: torch.Tensor) -> torch.Tensor:
        done = wait_for(x)
        time.sleep(MOMENT_S)
        return done

    collectives.wait = and_a_moment


def _own(value: object) -> object:
    """A tensor in memory that torch allocated, whoever made it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _most(profiler: torch.profiler.profile, begin_ns: int) -> int:
    """The most that was allocated at a time, from `begin_ns` on, of all that was allocated since the profiler began."""
    inner: Any = profiler.profiler
    found = [(e.start_ns(), e.nbytes()) for e in inner.kineto_results.events() if e.name() == "[memory]"]
    found.sort(key=lambda event: event[0])
    held = accumulate(size for _, size in found)
    return max(int(total) for (at, _), total in zip(found, held, strict=True) if at >= begin_ns)


if __name__ == "__main__":
    _free_where_it_is_seen()
    serve_requests(lambda: answer)
