"""A rank of the network benchmark: runs the collective it is asked for, and says when each one began and ended."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.backends import collectives
from autopar.runtime.job.process_group import join
from benchmarks.interleaved import serve_requests

Run = Callable[[], object]


def collective(what: str, elements: int, group: str) -> Run:
    """A collective of float32 values, as the rewritten step runs it; `elements` in all, shared evenly."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(elements)
    splits = [elements // n] * n
    part = x[: splits[rank]].clone()
    issue: dict[str, Run] = {
        "all-reduce": lambda: collectives.all_reduce(x, group),
        "reduce-scatter": lambda: collectives.sum_parts(
            collectives.wait(collectives.reduce_scatter(x, splits, rank, group)), x.dtype
        ),
        "all-gather": lambda: collectives.all_gather(part, splits, rank, group),
        "broadcast": lambda: collectives.broadcast(x, 0, group),
        "reduce": lambda: collectives.reduce(x, 0, group),
    }
    return issue[what]


def measure(run: Run, repeats: int, pause_s: float) -> list[tuple[float, float]]:
    """When each of `repeats` runs began and ended, by the clock that all ranks of a machine share."""
    seconds = []
    for _ in range(repeats):
        if pause_s:
            time.sleep(pause_s)
            dist.barrier()
        begin = time.monotonic()
        out = run()
        if isinstance(out, torch.Tensor):
            collectives.wait(out)
        seconds.append((begin, time.monotonic()))
    dist.barrier()
    return seconds


def answer(group: str, request: dict[str, Any]) -> dict[str, Any]:
    """One measurement: `{"what", "elements", "repeats", "pause_s"}`."""
    run = collective(request["what"], request["elements"], group)
    dist.barrier()
    return {"seconds": measure(run, request["repeats"], request["pause_s"])}


def joined() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers, in the group of all ranks."""
    group = join(60.0).name
    assert group is not None, "a rank by itself has no network to measure"
    return functools.partial(answer, group)


if __name__ == "__main__":
    serve_requests(joined)
