"""What a strategy, and what it emits, may depend on besides the parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology, topology_of

ALIKE = 1.05
"""Rates are taken as equal where the greatest is at most this many times the smallest."""


@dataclass(frozen=True, slots=True)
class Server:
    """A host that only serves."""

    name: str
    rate: float
    """What it can send to the ranks, and receive from them, in units of what the fastest rank can."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a strategy may depend on, besides the parameter."""

    world_size: int
    has_optimizer: bool = True
    """False: the program leaves synchronized gradients on every rank, and updates nothing."""
    elementwise_update: bool = True
    """Whether the optimizer updates each element from that element's gradient and state alone, so that it can
    run on slices."""
    clips: bool = False
    """Whether gradients are clipped by their global norm before the update, or looked at as a whole because the loss is
    scaled: no update begins before all gradients are there."""
    hosts: tuple[int, ...] = ()
    """By rank, the number of the rank's host; empty where every rank has a host of its own."""
    rates: tuple[float, ...] = ()
    """What each rank can send to other hosts, and receive from them, in bytes a second; empty where all can the same,
    or nothing is known."""
    servers: tuple[Server, ...] = ()
    """Hosts that only serve, in the cluster's order."""
    late_parameters: bool = False
    """Whether updated parameters may still be on their way between one step and the next."""
    sparse_update: bool = False
    """Whether the optimizer leaves an element alone whose gradient is zero, and can be given the others only."""
    keeps_moments: bool | None = None
    """Whether the optimizer keeps a first and a second moment of each element, as Adam does; `None` where that is not
    known yet."""
    plain_sgd: bool | None = None
    """Whether the optimizer is SGD without momentum, which keeps nothing from step to step; `None` where that is not
    known yet."""
    plain_adam: bool | None = None
    """Whether the optimizer is Adam or AdamW, which divides by the newest variance; `None` where that is not known
    yet."""

    variance_steps: int = 0
    """Steps that the variance of Adam or AdamW is an average over, 1 / (1 - beta2); 0 where that is not known."""

    @property
    def keeps_rows_together(self) -> str | None:
        """Why rows of one parameter cannot be updated on different ranks; `None` where they can."""
        if not self.has_optimizer:
            return "the program needs the optimizer"
        if not self.elementwise_update:
            return "the optimizer's update is not elementwise, so it cannot run on some of the rows"
        return None

    def on(self, cluster: ClusterSpec) -> Context:
        """This context on the hosts of a cluster."""
        hosts, rates, servers = _hosts(cluster)
        return replace(self, hosts=hosts, rates=rates, servers=servers)


@lru_cache(maxsize=4)  # several searches for a cluster share it
def _hosts(cluster: ClusterSpec) -> tuple[tuple[int, ...], tuple[float, ...], tuple[Server, ...]]:
    """`hosts`, `rates` and `servers` of a context."""
    topology = topology_of(cluster)
    numbers: dict[str, int] = {}
    hosts = tuple(numbers.setdefault(p.host.name, len(numbers)) for p in topology.ranks)
    rates = _rates(topology, hosts)
    fastest = max(rates, default=0.0)
    alike = fastest <= ALIKE * min(rates, default=0.0)
    servers = tuple(Server(s, _card(topology, s) / fastest) for s in topology.servers) if fastest else ()
    return hosts, () if alike else rates, servers


def _rates(topology: Topology, hosts: Sequence[int]) -> tuple[float, ...]:
    """What each rank can send to other hosts and receive from them: by the best way there and back, the slower
    direction, divided by the ranks that share the host's card. Where all ranks are on one host, the others serve."""
    first: dict[str, int] = {}
    for rank, place in enumerate(topology.ranks):
        first.setdefault(place.host.name, rank)
    best: dict[Hashable, float] = {}

    def both_ways(host: str, b: int | str) -> None:
        a, kind = first[host], topology.kind_of(host)
        rate = min(topology.bandwidth_bytes_per_s(a, b), topology.bandwidth_bytes_per_s(b, a))
        best[kind] = max(best.get(kind, 0.0), rate)

    for one, other in topology.pairs(first):
        both_ways(one, first[other])
    if len(first) == 1:
        for server in topology.servers:
            both_ways(next(iter(first)), server)
    ranks_on = Counter(hosts)
    shares = {p.host.name: best.get(topology.kind_of(p.host.name), 0.0) for p in topology.ranks}
    return tuple(shares[p.host.name] / ranks_on[host] for p, host in zip(topology.ranks, hosts, strict=True))


def _card(topology: Topology, server: str) -> float:
    """What a host that serves can send to all ranks together and receive from them, the slower of the two."""
    sent = max(topology.path(server, rank)[0].bandwidth_bytes_per_s for rank in range(topology.world_size))
    received = max(topology.path(rank, server)[-1].bandwidth_bytes_per_s for rank in range(topology.world_size))
    return min(sent, received)
