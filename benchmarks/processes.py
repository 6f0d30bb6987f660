"""Gloo ranks on this machine, each a process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from autopar.verification import start_method


def on_ranks(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Calls `function(rank, ranks, *args)` in as many processes, which form a group. Raises where one of them does."""
    with tempfile.TemporaryDirectory(prefix="autopar-benchmark-") as folder:
        each = ranks, folder, function, args
        start_processes(_process, each, nprocs=ranks, start_method=start_method())  # type: ignore[no-untyped-call]


def _process(rank: int, ranks: int, folder: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        function(rank, ranks, *args)
    finally:
        dist.destroy_process_group()
