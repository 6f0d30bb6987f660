"""The process group of a program: its own, so that no other collective comes between.

Ranks meet through the store of the default group, without a collective: a rank that does not show up is named.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.backends.collectives import may_fail
from autopar.errors import AutoparError, CollectiveError, PlanMismatchError
from autopar.ops.subgroups import Subgroups, all_subgroups
from autopar.runtime.job.meeting import Meeting, meet, served_by
from autopar.runtime.job.presence import Presence, without_store
from autopar.runtime.job.servers import join_servers, leave_servers
from autopar.runtime.job.store import Connection, StoreFailure, connected
from autopar.runtime.model.shared_memory import once
from autopar.spec.plan import ModelFingerprint

T = TypeVar("T")


@dataclass
class _Job:
    """What the programs of this process share."""

    connection: Connection
    """To the job's store: one for all programs, as each holds the store up while it is made."""
    programs: int = 0
    """How many have joined."""
    ended: list[Any] = field(default_factory=list)
    """Process groups of programs that nobody holds any more. The next program that joins destroys them: the garbage
    collector may come at a moment when PyTorch makes others."""

    def release(self) -> None:
        """Destroys them; gloo's alone, which needs no other rank for it."""
        while self.ended:
            pg = self.ended.pop()
            with contextlib.suppress(ValueError):  # of one that was left
                if dist.get_backend(pg) == "gloo":
                    dist.destroy_process_group(pg)


_joined: weakref.WeakKeyDictionary[Any, _Job] = weakref.WeakKeyDictionary()
"""By default process group."""


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
    channels: dict[tuple[Subgroups, int], Any] = field(default_factory=dict, compare=False, repr=False)
    """The process groups of subgroups and further communicators, made when they are first asked for."""
    meshes: dict[tuple[str, ...], str] = field(default_factory=dict, compare=False, repr=False)
    """The meshes of all ranks with servers, by the servers' names, likewise."""
    meetings: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    """Numbers each rendezvous of the group, alike on all ranks, so that none reads what another has left."""

    @property
    def name(self) -> str | None:
        return None if self.pg is None else str(self.pg.group_name)

    def channel(self, subgroups: Subgroups, communicator: int) -> str | None:
        """The name of the process group in which this rank's subgroup does the collectives of a communicator. All ranks
        must ask for the same ones in the same order; with one rank there is none."""
        if self.pg is None or (not subgroups and communicator == 0):
            return self.name
        if (subgroups, communicator) not in self.channels:
            assert self.presence is not None
            timeout, made_of = timedelta(seconds=self.timeout_s), all_subgroups(subgroups, self.world_size)

            def make() -> list[Any]:
                return [dist.new_group([*subgroup], timeout=timeout) for subgroup in made_of]

            groups = self.presence.connect("connecting the ranks of each subgroup", make, self.timeout_s)
            for subgroup, made in zip(made_of, groups, strict=True):
                if self.rank in subgroup:
                    self.channels[subgroups, communicator] = made
        return str(self.channels[subgroups, communicator].group_name)

    def mesh(self, servers: tuple[str, ...]) -> str:
        """The name of the mesh of all ranks with the hosts that serve. All ranks must ask for it at the same place.
        Raises `CollectiveError` where a server does not come."""
        assert self.presence is not None, "one rank has nothing to be added up"
        if servers not in self.meshes:
            made = join_servers(str(self.name), self.presence, servers, self.timeout_s)
            weakref.finalize(self.presence, leave_servers, made)
            self.meshes[servers] = made
        return self.meshes[servers]

    def leave(self, what: str, error: BaseException) -> None:
        """Ends this rank's part in the program, in which the other ranks wait for it: their collectives fail at once,
        and they name this rank. Those on GPUs only at their timeout, as NCCL's kernels do not hear of it."""
        if self.presence is None:
            return
        self.presence.leave(what, error)
        for pg in (self.pg, *self.channels.values()):
            if dist.get_backend(pg) == "gloo":
                dist.destroy_process_group(pg)

    def guard(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around communication that all ranks take part in; see `Presence.guard`."""
        return contextlib.nullcontext() if self.presence is None else self.presence.guard(what)


def join(timeout_s: float) -> Group:
    """Joins the ranks of this job: the default process group where there is one, else the one torchrun describes,
    else this process alone. Raises `CollectiveError`, with their names, where not every rank comes."""
    if not dist.is_available() or (not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1):
        return Group(0, 1, timeout_s=timeout_s)
    given = dist.is_initialized()
    if given:
        met = Meeting(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())
    else:
        met = meet(timeout_s)
    if met.world_size == 1:
        return Group(0, 1, timeout_s=timeout_s)
    job = _joined.get(dist.group.WORLD) if given else None
    try:
        job = job or _Job(connected(met.store))
    except StoreFailure as e:
        raise CollectiveError(without_store(f"rank {met.rank}", served_by(), e)) from e
    presence = Presence(job.connection, str(job.programs), met.rank, met.world_size, served_by())
    presence.gather(timeout_s)
    timeout = timedelta(seconds=timeout_s)
    device = _own_device()
    if not given:
        if device is not None:
            torch.cuda.set_device(device)
        backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"

        def initialize() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            dist.init_process_group(backend, store=met.store, rank=met.rank, world_size=met.world_size, timeout=timeout)

        presence.connect("connecting the ranks of this job", initialize, timeout_s)
    presence.joined()
    job.release()
    job.programs += 1
    _joined[dist.group.WORLD] = job
    pg = presence.connect("connecting the ranks of a program", lambda: dist.new_group(timeout=timeout), timeout_s)
    group = Group(met.rank, met.world_size, pg, timeout_s, presence)
    weakref.finalize(presence, _end, job, pg, group.channels).atexit = False
    return group


def _own_device() -> int | None:
    """The number of this rank's GPU; `None` where the machine has none for it, as on a cluster of processors."""
    if not torch.cuda.is_available():
        return None
    device = int(os.environ.get("LOCAL_RANK", "0"))
    return device if device < torch.cuda.device_count() else None


def _end(job: _Job, pg: Any, channels: Mapping[Any, Any]) -> None:
    job.ended += [pg, *channels.values()]


def average_buffers(buffers: Iterable[torch.Tensor], group: Group) -> None:
    """Averages floating-point buffers over the ranks, in place; integer ones are counters, and alike on all ranks."""
    if group.pg is None:
        return
    with torch.no_grad(), group.guard("averaging buffers"):
        for buffer in buffers:
            if buffer.is_floating_point():
                own = once(buffer)
                total = own.to(torch.float64, memory_format=torch.contiguous_format)  # equal ones stay as they are
                total = total.clone() if total is own else total
                with may_fail():
                    dist.all_reduce(total, group=group.pg)
                own.copy_(total / group.world_size)


def average(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The mean over the ranks, of a tensor's shape; by all ranks together."""
    with torch.no_grad(), group.guard("averaging replicas"), may_fail():
        few = tensor.dtype in (torch.float16, torch.bfloat16)
        mean = tensor.detach().to(torch.float32 if few else tensor.dtype).contiguous() / group.world_size
        dist.all_reduce(torch.view_as_real(mean) if mean.is_complex() else mean, group=group.pg)
    return mean.to(tensor.dtype)


def take_from_rank_0(tensors: Iterable[torch.Tensor], group: Group, what: str) -> None:
    """Gives every rank the values that rank 0 has, in place; by all ranks together."""
    if group.pg is None:
        return
    with torch.no_grad(), group.guard(what):
        for tensor in tensors:
            own = once(tensor)
            value = own.clone(memory_format=torch.contiguous_format)
            with may_fail():
                dist.broadcast(value, group_src=0, group=group.pg)
            if not torch.equal(own, value):  # what is equal may be saved for a backward pass, which a copy would void
                own.copy_(value)


class Rendezvous:
    """Lets ranks compare what they hold, through the store."""

    def __init__(self, group: Group, limit_s: float | None = None) -> None:
        """`limit_s`: how long to wait for a rank that lives; by default the group's timeout."""
        self.group = group
        self.limit_s = group.timeout_s if limit_s is None else limit_s
        self.store = None
        if group.presence is not None:
            self.store = group.presence.store.under(f"meeting/{next(group.meetings)}", group.timeout_s)

    def agree(self, topic: str, mine: str) -> None:
        """Raises `PlanMismatchError` unless every rank holds the same text; `CollectiveError` where one is late."""
        theirs = self.exchange(topic, mine)
        others = {r: t for r, t in enumerate(theirs) if t != mine}
        if others:
            rank, text = next(iter(others.items()))
            raise PlanMismatchError(
                f"rank {self.group.rank} and rank {rank} disagree about the {topic}: {_short(mine)} here, "
                f"{_short(text)} there. All "
                "ranks must build the same model and load the same plan; gloo would go on and give wrong sums silently"
            )

    def agree_on_model(self, mine: ModelFingerprint) -> None:
        """Raises `PlanMismatchError`, with what differs, unless every rank holds the same model."""
        digests = self.exchange("model", mine.digest)
        rank = next((r for r, digest in enumerate(digests) if digest != mine.digest), None)
        if len(set(digests)) > 1:  # on every rank, so every rank takes part
            read = ModelFingerprint.model_validate_json
            models = self.exchange_as("parameters of the model", mine.model_dump_json(), read)
            assert rank is not None
            other = models[rank]
            lines = mine.difference(other, f"rank {self.group.rank}", f"rank {rank}")
            raise PlanMismatchError(
                f"rank {self.group.rank} and rank {rank} hold different models: {'; '.join(lines[:5])}. All ranks must "
                "build the same model"
            )

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Every rank's text, by rank; raises `CollectiveError` where one is late."""
        return self.exchange_as(topic, mine, str)

    def exchange_as(self, topic: str, mine: str, parse: Callable[[str], T]) -> list[T]:
        """What `parse` makes of every rank's text, by rank; raises `CollectiveError` where one is late, and where what
        the store has cannot be parsed."""
        if self.store is None:
            return [parse(mine)]
        self._set(f"{topic}/{self.group.rank}", mine, topic)
        return [self._get(f"{topic}/{r}", r, topic, parse) for r in range(self.group.world_size)]

    def from_rank_0(self, topic: str, make: Callable[[], str]) -> str:
        """What `make` returns on rank 0, on every rank; where it fails there, it fails everywhere, with the same kind
        of error where that is one of autopar's."""
        if self.store is None:
            return make()
        if self.group.rank != 0:
            text, error = self._get(topic, 0, topic, partial(_answer, topic))
            if error is not None:
                raise error
            return text
        try:
            text = make()
        except Exception as e:
            self._set(topic, f"!{type(e).__name__}:{e}", topic)
            raise
        self._set(topic, f"={text}", topic)
        return text

    def _set(self, key: str, value: str, topic: str) -> None:
        assert self.store is not None and self.group.presence is not None
        with self.group.presence.asking(self._here(topic)):
            self.store.set(key, value)

    def _get(self, key: str, rank: int, topic: str, parse: Callable[[str], T]) -> T:
        store, presence = self.store, self.group.presence
        assert store is not None and presence is not None
        found: list[str] = []

        def is_there(within_s: float) -> bool:
            text = store.get(key)
            if text is None:
                time.sleep(within_s)
                return False
            found.append(text)
            return True

        presence.wait_for(self._here(topic), is_there, [rank], self.limit_s)
        return store.read(key, found[0], parse)

    def _here(self, topic: str) -> str:
        return f"rank {self.group.rank} waited to compare the {topic}"


def _answer(topic: str, text: str) -> tuple[str, AutoparError | None]:
    """What rank 0 has made, and the error to raise where it has failed."""
    if text[:1] == "=":
        return text[1:], None
    kind, mark, said = text[1:].partition(":")
    if text[:1] != "!" or not mark:
        raise ValueError("rank 0 writes '=' and what it has made, or '!', the name of an error and a colon")
    known = getattr(sys.modules[AutoparError.__module__], kind, None)
    if isinstance(known, type) and issubclass(known, AutoparError):
        return "", known(f"rank 0: {said}")
    return "", CollectiveError(f"rank 0 could not make the {topic}: {said}")


def _short(text: str) -> str:
    return text if len(text) <= 1000 else f"{text[:1000]}..."
