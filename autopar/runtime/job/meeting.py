"""How the ranks of a job that torchrun describes find its store, each within a deadline."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from autopar.errors import CollectiveError
from autopar.runtime.job.store import InThread

RANK_0, TORCHRUN = "rank 0", "torchrun on the first host"
"""Who serves the store."""
_KNOCK_S = 1.0
_OPEN_S = 5.0
"""How long torch may try to connect to who listens already; shorter than this rank waits for torch."""
_SLACK_S = 3.0
"""How much longer than it was told torch may take to see that the store has gone."""
_met: Iterator[int] = itertools.count()
"""Numbers the jobs that this process was a part of, alike on all its ranks."""


@dataclass(frozen=True)
class Meeting:
    """This rank's place in a job, and the job's store."""

    rank: int
    world_size: int
    store: Any
    """Of torch."""


def served_by() -> str:
    """Whose process serves the store: rank 0's, unless torchrun says that its own does."""
    return TORCHRUN if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else RANK_0


def attempt() -> str:
    """Which start of its ranks torchrun says this is. A store of torchrun's lives on when it restarts them, with what
    those that are gone have written, so keys that could be taken for this start's hold this number."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def meet(timeout_s: float) -> Meeting:
    """This rank's place as the environment has it, and the store at `MASTER_ADDR` and `MASTER_PORT`, which rank 0
    begins to serve. Raises `CollectiveError` where the environment is incomplete, or nobody serves."""
    rank, world_size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host, by = os.environ.get("MASTER_ADDR", ""), served_by()
    serves = by == RANK_0 and rank == 0
    where = f"the job's store, which {by} serves at MASTER_ADDR and MASTER_PORT ({host}:{port})"
    store = _served(host, port, where, timeout_s) if serves else _reached(host, port, rank, where, by, timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return Meeting(rank, world_size, PrefixStore(f"autopar/attempt/{attempt()}/{next(_met)}", store))


def _served(host: str, port: int, where: str, timeout_s: float) -> TCPStore:
    try:
        return _open(host, port, True, timeout_s)
    except RuntimeError as e:
        raise CollectiveError(f"rank 0 could not serve {where}: {str(e).strip().splitlines()[0][:300]}") from e


def _reached(host: str, port: int, rank: int, where: str, by: str, timeout_s: float) -> TCPStore:
    """Waits until somebody listens, and only then lets torch connect, which would wait as well, for longer, and with
    many lines on stderr."""
    end, pause_s = time.monotonic() + timeout_s, 0.02
    while True:
        try:
            socket.create_connection((host, port), timeout=_KNOCK_S).close()
            opening = InThread(lambda: _open(host, port, False, min(_OPEN_S, timeout_s / 2)), "autopar-store")
            if not opening.is_done(timeout_s + _SLACK_S):
                raise CollectiveError(
                    f"rank {rank} has reached {where}, but had no answer within {timeout_s:g} s: {by} is frozen, or "
                    "another program has that port"
                )
            return opening.result()
        except (OSError, dist.DistError) as e:
            if time.monotonic() > end:
                cause = str(getattr(e, "strerror", None) or e).strip().splitlines()[0][:200]
                raise CollectiveError(
                    f"rank {rank} has not reached {where}, within {timeout_s:g} s: {by} never came, is gone, or cannot "
                    f"be reached from here ({cause})"
                ) from e
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def _open(host: str, port: int, serves: bool, timeout_s: float) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # torch would only count them; `Presence` says who is missing
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        found = f"is '{text}'" if text else "is not set"
        raise CollectiveError(
            f"the environment variable {name} {found}, where torchrun leaves a number: start every rank with torchrun, "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does"
        )
    return int(text)
