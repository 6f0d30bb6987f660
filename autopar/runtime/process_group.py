"""The process group of a program: its own, so that no other collective comes between; who is late or gone.

Ranks meet through the store of the default group, without a collective: a rank that does not show up is named.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from autopar.errors import CollectiveError, PlanMismatchError

ROLL_CALL_S = 5.0


@dataclass(frozen=True)
class Group:
    """This rank's place among the ranks of a program."""

    rank: int
    world_size: int
    pg: Any = None
    """The process group; `None` with one rank."""
    timeout_s: float = 300.0
    meetings: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    """Numbers each rendezvous of the group, alike on all ranks, so that none reads what another has left."""

    @property
    def name(self) -> str | None:
        return None if self.pg is None else str(self.pg.group_name)


def join(timeout_s: float) -> Group:
    """Joins the ranks of this job: the default process group where there is one, else the one torchrun describes,
    else this process alone."""
    if not dist.is_available() or (not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1):
        return Group(0, 1, timeout_s=timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if dist.get_world_size() == 1:
        return Group(0, 1, timeout_s=timeout_s)
    pg = dist.new_group(timeout=timedelta(seconds=timeout_s))
    return Group(dist.get_rank(), dist.get_world_size(), pg, timeout_s)


def average_buffers(buffers: Iterable[torch.Tensor], group: Group) -> None:
    """Averages floating-point buffers over the ranks, in place; integer ones are counters, and alike on all ranks."""
    if group.pg is None:
        return
    with torch.no_grad():
        for buffer in buffers:
            if buffer.is_floating_point():
                mean = buffer.detach().contiguous() / group.world_size
                dist.all_reduce(mean, group=group.pg)
                buffer.copy_(mean)


class Rendezvous:
    """Lets ranks compare what they hold, and call the roll, through the store."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.store = None
        if group.pg is not None:
            self.store = PrefixStore(
                f"autopar/{group.name}/{next(group.meetings)}", dist.distributed_c10d._get_default_store()
            )

    def agree(self, topic: str, mine: str) -> None:
        """Raises `PlanMismatchError` unless every rank holds the same text; `CollectiveError` where one is late."""
        theirs = self.exchange(topic, mine)
        others = {r: t for r, t in enumerate(theirs) if t != mine}
        if others:
            rank, text = next(iter(others.items()))
            raise PlanMismatchError(
                f"rank {self.group.rank} and rank {rank} disagree about the {topic}: {mine} here, {text} there. All "
                "ranks must build the same model and load the same plan; gloo would go on and give wrong sums silently"
            )

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Every rank's text, by rank; raises `CollectiveError` where one is late."""
        if self.store is None:
            return [mine]
        self.store.set(f"{topic}/{self.group.rank}", mine)
        return [self._get(f"{topic}/{r}", r, topic) for r in range(self.group.world_size)]

    def from_rank_0(self, topic: str, make: Callable[[], str]) -> str:
        """What `make` returns on rank 0, on every rank; where it fails there, it fails everywhere."""
        if self.store is None:
            return make()
        if self.group.rank != 0:
            answer = self._get(topic, 0, topic)
            if answer.startswith("!"):
                raise CollectiveError(f"rank 0 could not make the {topic}: {answer[1:]}")
            return answer[1:]
        try:
            text = make()
        except Exception as e:
            self.store.set(topic, f"!{e}")
            raise
        self.store.set(topic, f"={text}")
        return text

    def _get(self, key: str, rank: int, topic: str) -> str:
        assert self.store is not None
        try:
            self.store.wait([key], timedelta(seconds=self.group.timeout_s))
            return str(self.store.get(key).decode())
        except Exception as e:
            raise CollectiveError(
                f"rank {rank} has not come to the {topic} within {self.group.timeout_s:g} s: it is late or gone"
            ) from e

    @contextlib.contextmanager
    def guard(self, step: int) -> Iterator[None]:
        """Turns a failed collective into an error that names the ranks that are late or gone."""
        try:
            yield
        except (RuntimeError, dist.DistError) as e:
            if self.store is None or not _is_communication(e):
                raise
            raise CollectiveError(self._missing(step, e)) from e

    def _missing(self, step: int, error: BaseException) -> str:
        assert self.store is not None
        cause = str(error).strip().splitlines()[0][:200]
        present, unreachable = [], False
        try:
            self.store.set(f"alive/{step}/{self.group.rank}", "1")
            for r in range(self.group.world_size):
                with contextlib.suppress(Exception):
                    self.store.wait([f"alive/{step}/{r}"], timedelta(seconds=ROLL_CALL_S))
                    present.append(r)
        except Exception:
            unreachable = True
        absent = [r for r in range(self.group.world_size) if r not in present]
        if unreachable:
            return (
                f"step {step}, rank {self.group.rank}: a collective failed and the store does not answer, so the "
                f"process that serves it (rank 0, or torchrun) is gone: {cause}"
            )
        if not absent:
            return f"step {step}, rank {self.group.rank}: a collective failed although every rank is alive: {cause}"
        who = ", ".join(map(str, absent))
        return f"step {step}: rank {who} is late or gone (rank {self.group.rank} waited for it): {cause}"


def _is_communication(e: BaseException) -> bool:
    text = str(e)
    words = ("gloo", "Connection", "onnection closed", "Timed out", "timeout", "NCCL", "Socket", "store", "peer")
    return isinstance(e, dist.DistError) or any(w in text for w in words)
