"""Starts gloo ranks as processes of their own, and brings their results back."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from autopar.runtime.job.ports import held_port
from autopar.verification import start_method

WITHOUT_LOGS = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""The environment of a process whose every word is tested: torch's C++ code warns where a host's name is not found,
as it happens on a loaded machine or without a name server."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `function(rank, world_size, *args)` in `world_size` processes that form a gloo group; returns what each
    returns, which JSON must be able to hold."""
    return run_worlds(function, {world_size: args})[world_size]


def run_worlds(
    function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]], before: Callable[[], Any] | None = None
) -> dict[int, list[Any]]:
    """The same for several world sizes, one after the other in the same processes, which keep what they have cached.
    `args`: for each world size, what the function is given behind it.
    `before`: is called once, in the process that ranks are forked from, for what it caches to be theirs."""
    with ExitStack() as held, tempfile.TemporaryDirectory(prefix="autopar-test-") as folder:
        ports = {n: held.enter_context(held_port()) for n in args}
        given = (ports, folder, function, dict(args))
        if before is None or start_method() == "spawn":
            start_processes(_process, given, nprocs=max(args), start_method=start_method())
        else:
            start_processes(_parent, (before, given, max(args)), start_method=start_method())
        return {n: [json.loads((Path(folder) / f"{n}-{r}").read_text()) for r in range(n)] for n in args}


def _parent(index: int, before: Callable[[], Any], given: tuple[Any, ...], ranks: int) -> None:
    multiprocessing.current_process().daemon = False  # which may have no processes of its own
    torch.set_num_threads(1)
    before()
    start_processes(_process, given, nprocs=ranks, start_method="fork")


def _process(
    rank: int, ports: dict[int, int], folder: str, function: Callable[..., Any], args: dict[int, tuple[Any, ...]]
) -> None:
    torch.set_num_threads(1)
    for world_size, port in ports.items():
        if rank < world_size:
            result = _rank(rank, world_size, port, function, args[world_size])
            (Path(folder) / f"{world_size}-{rank}").write_text(json.dumps(result))


def _rank(rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if world_size > 1:
        dist.init_process_group("gloo")
    result = function(rank, world_size, *args)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result
