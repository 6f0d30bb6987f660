"""A lab: the hosts of a cluster on this machine, for as long as they are needed.

    with Lab.of(ClusterSpec.load("cluster.yaml")) as lab:
        launch(lab.ranks, ["python", "train.py"], timeout_s=600)

It needs root on Linux with iproute2; `unavailable_reason()` says what is missing. `loopback(cluster)` has the same
face and works anywhere, with every rank on this machine and no limit to any link: `emulated` is False, and `note`
says so for the results.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from autopar.lab import guard
from autopar.lab.build import build, set_rates
from autopar.lab.host import Host, this_machine
from autopar.lab.interrupts import exit_on_signals
from autopar.lab.namespaces import (
    LabUnavailable,
    cleanup_stale,
    lab_namespaces,
    new_prefix,
    remove,
    unavailable_reason,
)
from autopar.lab.wiring import Wiring, of_cluster, star

if TYPE_CHECKING:
    from autopar.spec.cluster import ClusterSpec


_EMULATED = "network namespaces on one machine, links shaped, latency not emulated"


class Lab:
    """Hosts joined by switches and cables. A context manager; `up` and `down` where a `with` does not fit.

    Inside `with`, SIGTERM and SIGHUP end the process by SystemExit, so that the lab is removed. Where the process has
    no time for that, as when it is killed, its watchdog removes the lab (`autopar.lab.guard`).
    """

    emulated = True
    """Whether links have the rates of the cluster. False where all ranks share this machine's loopback."""

    def __init__(
        self,
        rates_bps: Sequence[float | None] = (),
        *,
        wiring: Wiring | None = None,
        placement: Sequence[int] | None = None,
        note: str = "",
        cores_apart: bool = False,
    ) -> None:
        """`rates_bps`: hosts on one switch, with the rate of each one's link in bit/s, the same in and out; None for
        as fast as it goes. Or any `wiring`. `placement`: the host of each rank; default: one rank a host.
        `cores_apart`: the machine's cores are shared out evenly, and each host's processes run on its own. Otherwise
        they run on any core, unless the ranks divide evenly among the cores, two or more to each: then each host stays
        on one core, for a step takes up to half as long again while three of four ranks happen to be on one of two
        cores. Raises `ValueError` where cores are to be apart and there are more hosts than cores."""
        self.wiring = wiring or star(rates_bps)
        self.placement = tuple(range(len(self.wiring.hosts)) if placement is None else placement)
        self.note = note or _EMULATED
        count = len(self.wiring.hosts)
        self._cores = _shared_out(count) if cores_apart else _spread(count, self.placement)
        self.hosts: tuple[Host, ...] = ()
        """In the order of the cluster, those that only serve included; empty while the lab is down."""
        self._owner = os.getpid()
        self._prefix = new_prefix()
        self._is_up = False
        self._on_exit = ExitStack()

    @classmethod
    def of(cls, cluster: ClusterSpec, *, scale: float = 1.0, cores_apart: bool = False) -> Lab:
        """The hosts of a cluster, with every rate times `scale`. Latencies are not emulated, nor are the links between
        the devices of a host: its ranks share a namespace, and talk over its loopback. Raises `ClusterSpecError` where
        a lab cannot have so many hosts or a rate so low."""
        placement = _placement(cluster)
        return Lab(wiring=of_cluster(cluster, scale), placement=placement, note=_note(scale), cores_apart=cores_apart)

    @property
    def ranks(self) -> tuple[Host, ...]:
        """The host of each rank, in rank order; empty while the lab is down."""
        return tuple(self.hosts[i] for i in self.placement) if self.hosts else ()

    @property
    def servers(self) -> tuple[Host, ...]:
        """The hosts without ranks; empty while the lab is down."""
        return tuple(host for i, host in enumerate(self.hosts) if i not in self.placement)

    @property
    def rates_bps(self) -> tuple[float | None, ...]:
        """What each host can send, over all its cables, in bit/s; None for as fast as it goes."""
        return tuple(self.wiring.sends_bps(host) for host in self.wiring.hosts)

    def set_rates(self, cluster: ClusterSpec, *, scale: float = 1.0) -> None:
        """Gives the links the rates of another cluster, times `scale`, while ranks live on. Raises ValueError where
        that cluster has other hosts, cables or ranks than this lab."""
        new = of_cluster(cluster, scale)
        if new.layout != self.wiring.layout or tuple(_placement(cluster)) != self.placement:
            raise ValueError(f"the lab is laid out otherwise than the cluster ({cluster.summary}): bring up another")
        if self._is_up:
            set_rates(self._prefix, new)
        self.wiring, self.note = new, _note(scale)

    def up(self) -> Self:
        """Brings the hosts up; raises `LabUnavailable` where this machine cannot. Leaves nothing behind if it fails."""
        reason = unavailable_reason()
        if reason is not None:
            raise LabUnavailable(reason)
        guard.watch()
        cleanup_stale()
        self._is_up = True
        atexit.register(self.down)
        try:
            hosts = build(self._prefix, self.wiring)
            self.hosts = tuple(replace(h, cores=own) for h, own in zip(hosts, self._cores, strict=True))
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Kills every process in the lab and removes it. Can be called again; does nothing in a forked child."""
        if not self._is_up or os.getpid() != self._owner:
            return
        remove(lab_namespaces(self._prefix))
        self._is_up, self.hosts = False, ()
        atexit.unregister(self.down)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(exit_on_signals())
            stack.callback(self.down)
            self.up()
            self._on_exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_exit.close()


class _Loopback(Lab):
    emulated = False

    def up(self) -> Self:
        self.hosts = tuple(this_machine(name) for name in self.wiring.hosts)
        return self

    def down(self) -> None:
        self.hosts = ()

    def set_rates(self, cluster: ClusterSpec, *, scale: float = 1.0) -> None:
        """There are no links to be given a rate."""


def loopback(cluster: ClusterSpec) -> Lab:
    """The ranks of a cluster on this machine, over its loopback: no namespaces, no rates, no root needed."""
    names = tuple(host.name for host in cluster.all_hosts)
    return _Loopback(
        wiring=Wiring(names, (), (), {}),
        placement=_placement(cluster),
        note="loopback of one machine, not emulated: no link has a rate, so times say nothing of the network",
    )


@contextmanager
def private_namespace() -> Iterator[Host]:
    """One host with nothing but loopback: its counter of bytes sent is the sum over all ranks that run there."""
    with Lab(wiring=Wiring(("private",), (), (), {})) as lab:
        yield lab.hosts[0]


def _note(scale: float) -> str:
    return _EMULATED + (f", every rate times {scale:g}" if scale != 1 else "")


def _placement(cluster: ClusterSpec) -> list[int]:
    return [i for i, host in enumerate(cluster.all_hosts) for _ in host.devices]


def _shared_out(hosts: int) -> list[tuple[int, ...]]:
    """The machine's cores that each host has for itself."""
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // hosts
    if each == 0:
        raise ValueError(
            f"{hosts} hosts cannot have cores apart: this process may use {len(usable)}. Use no more hosts than "
            "cores, or cores_apart=False, and they share them"
        )
    return [tuple(usable[i * each : (i + 1) * each]) for i in range(hosts)]


def _spread(hosts: int, placement: Sequence[int]) -> list[tuple[int, ...]]:
    """A core for each host, where the ranks divide evenly among the machine's cores, two or more to each, and no host's
    ranks come to lie on two cores; else none. Hosts without ranks get none."""
    usable, ranks = sorted(os.sched_getaffinity(0)), len(placement)
    host_on_core = {(host, usable[rank * len(usable) // ranks]) for rank, host in enumerate(placement)}
    is_even = ranks > len(usable) and ranks % len(usable) == 0 and len(host_on_core) == len(set(placement))
    return [tuple(core for at, core in host_on_core if at == host and is_even) for host in range(hosts)]
