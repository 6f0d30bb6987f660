"""Starts gloo ranks as processes of their own, and brings their results back."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `function(rank, world_size, *args)` in `world_size` processes that form a gloo group; returns what each
    returns, which JSON must be able to hold."""
    with tempfile.TemporaryDirectory(prefix="autopar-test-") as folder:
        try:
            _spawn(world_size, folder, function, args)
        except ProcessExitedException as e:
            # gloo's own crash, see `autopar.runtime.process_group`: said, and not taken for that of what is tested.
            if e.exit_code not in (-signal.SIGSEGV, -signal.SIGABRT):
                raise
            warnings.warn(f"a rank died of {e.signal_name}; all are started again", stacklevel=2)
            _spawn(world_size, folder, function, args)
        return [json.loads((Path(folder) / str(r)).read_text()) for r in range(world_size)]


def _spawn(world_size: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    mp.spawn(_rank, (world_size, free_port(), folder, function, args), nprocs=world_size)  # type: ignore[attr-defined]


def _rank(rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
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
    (Path(folder) / str(rank)).write_text(json.dumps(result))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
