"""The process group of a program: its own, so that no other collective comes between.

Ranks meet through the store of the default group, without a collective: a rank that does not show up is named.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from autopar.errors import CollectiveError, PlanMismatchError
from autopar.ir.primitives import Teams, all_teams
from autopar.runtime.collectives import may_fail
from autopar.runtime.presence import Presence
from autopar.runtime.servers import join_servers, leave_servers
from autopar.spec.plan import ModelFingerprint


@dataclass(frozen=True)
class Group:
    """This rank's place among the ranks of a program."""

    rank: int
    world_size: int
    pg: Any = None
    """The process group; `None` with one rank."""
    timeout_s: float = 300.0
    presence: Presence | None = field(default=None, compare=False, repr=False)
    """Who is there; `None` with one rank."""
    channels: dict[tuple[Teams, int], Any] = field(default_factory=dict, compare=False, repr=False)
    """The process groups of teams and further lanes, made when they are first asked for."""
    meshes: dict[tuple[str, ...], str] = field(default_factory=dict, compare=False, repr=False)
    """The meshes of all ranks with servers, by the servers' names, likewise."""
    meetings: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    """Numbers each rendezvous of the group, alike on all ranks, so that none reads what another has left."""

    @property
    def name(self) -> str | None:
        return None if self.pg is None else str(self.pg.group_name)

    def channel(self, teams: Teams, lane: int) -> str | None:
        """The name of the process group in which this rank's team does the collectives of a lane. All ranks must ask
        for the same ones in the same order; with one rank there is none."""
        if self.pg is None or (not teams and lane == 0):
            return self.name
        if (teams, lane) not in self.channels:
            for team in all_teams(teams, self.world_size):
                made = dist.new_group([*team], timeout=timedelta(seconds=self.timeout_s))
                if self.rank in team:
                    self.channels[teams, lane] = made
        return str(self.channels[teams, lane].group_name)

    def mesh(self, servers: tuple[str, ...]) -> str:
        """The name of the mesh of all ranks with the hosts that serve. All ranks must ask for it at the same place.
        Raises `CollectiveError` where a server does not come."""
        assert self.presence is not None, "one rank has nothing to be added up"
        if servers not in self.meshes:
            made = join_servers(str(self.name), self.rank, self.world_size, servers, self.timeout_s)
            weakref.finalize(self.presence, leave_servers, made)
            self.meshes[servers] = made
        return self.meshes[servers]

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around communication that all ranks take part in; see `Presence.guard`."""
        return contextlib.nullcontext() if self.presence is None else self.presence.guard(what)


def join(timeout_s: float) -> Group:
    """Joins the ranks of this job: the default process group where there is one, else the one torchrun describes,
    else this process alone. Raises `CollectiveError` where not every rank comes."""
    if not dist.is_available() or (not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1):
        return Group(0, 1, timeout_s=timeout_s)
    try:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return Group(0, 1, timeout_s=timeout_s)
        pg = dist.new_group(timeout=timedelta(seconds=timeout_s))
        served_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        presence = Presence(str(pg.group_name), rank, world_size, rank == 0 and not served_elsewhere)
    except (dist.DistError, RuntimeError) as e:
        raise CollectiveError(
            f"rank {os.environ.get('RANK', '?')}: the ranks of this job did not come together within {timeout_s:g} s; "
            f"every one must call optimize: {str(e).strip().splitlines()[0][:300]}"
        ) from e
    return Group(rank, world_size, pg, timeout_s, presence)


def average_buffers(buffers: Iterable[torch.Tensor], group: Group) -> None:
    """Averages floating-point buffers over the ranks, in place; integer ones are counters, and alike on all ranks."""
    if group.pg is None:
        return
    with torch.no_grad(), group.guard("averaging buffers"):
        for buffer in buffers:
            if buffer.is_floating_point():
                own = _once(buffer)
                mean = own.contiguous() / group.world_size
                with may_fail():
                    dist.all_reduce(mean, group=group.pg)
                own.copy_(mean)


def copy_from_rank_0(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Gives every rank rank 0's values, in place; by all ranks together."""
    with torch.no_grad(), group.guard("making the ranks' models equal"):
        for tensor in tensors:
            own = _once(tensor)
            value = own.contiguous()
            with may_fail():
                dist.broadcast(value, group_src=0, group=group.pg)
            own.copy_(value)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, each element once: an expanded dimension, all of whose elements are one, has one."""
    tensor = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class Rendezvous:
    """Lets ranks compare what they hold, through the store."""

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

    def agree_on_model(self, mine: ModelFingerprint) -> None:
        """Raises `PlanMismatchError`, with what differs, unless every rank holds the same model."""
        digests = self.exchange("model", mine.digest)
        rank = next((r for r, digest in enumerate(digests) if digest != mine.digest), None)
        if len(set(digests)) > 1:  # on every rank, so every rank takes part
            texts = self.exchange("parameters of the model", mine.model_dump_json())
            assert rank is not None
            other = ModelFingerprint.model_validate_json(texts[rank])
            lines = mine.difference(other, f"rank {self.group.rank}", f"rank {rank}")
            raise PlanMismatchError(
                f"rank {self.group.rank} and rank {rank} hold different models: {'; '.join(lines[:5])}. All ranks must "
                "build the same model"
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
        assert self.store is not None and self.group.presence is not None
        is_gone = self.group.presence.watch(rank)
        end, pause_s = time.monotonic() + self.group.timeout_s, 0.005
        try:
            while not self.store.check([key]):
                said = is_gone()
                if self.store.check([key]):  # a rank that has ended since may have written it before
                    break
                if said is not None or time.monotonic() > end:
                    said = said or f"rank {rank} is late: it runs, but has not come within {self.group.timeout_s:g} s"
                    raise CollectiveError(f"rank {self.group.rank} waited to compare the {topic}: {said}")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.25)
            return str(self.store.get(key).decode())
        except dist.DistError as e:
            raise CollectiveError(
                f"rank {self.group.rank} waited to compare the {topic}: the store does not answer, so the process that "
                "serves it (rank 0, or torchrun) is gone"
            ) from e
