"""What a lab lays out: hosts, switches, the cables between them with their rates, and the way to each host.

Plain data, made of a cluster's description without touching the machine; `autopar.lab.namespaces` builds it. Rates
and ways are those of `autopar.spec.topology.Topology`, so that a transfer in the lab crosses the links it is priced on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from autopar.errors import ClusterSpecError

if TYPE_CHECKING:
    from autopar.spec.cluster import ClusterSpec
    from autopar.spec.topology import Topology

MOST_HOSTS = 250
"""So that host i has the address 10.77.0.(i + 1)."""
LOWEST_RATE_BPS = 1e6
"""A token bucket of a rate below this lets whole messages through at once, at full speed."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A cable between two hosts or switches. Rates are in bit/s; None for as fast as it goes."""

    one: str
    other: str
    forth_bps: float | None
    """From `one` to `other`."""
    back_bps: float | None


@dataclass(frozen=True, slots=True)
class Wiring:
    """Hosts, switches, and the cables between them."""

    hosts: tuple[str, ...]
    switches: tuple[str, ...]
    wires: tuple[Wire, ...]
    ways: Mapping[tuple[str, str], str]
    """For a host or switch, and a host that is to be reached: the neighbour to pass it on to."""

    @property
    def layout(self) -> tuple[object, ...]:
        """All but the rates themselves: equal for wirings between which a lab that is up may change."""
        wires = tuple((w.one, w.other, w.forth_bps is None, w.back_bps is None) for w in self.wires)
        return self.hosts, self.switches, wires

    def wires_at(self, place: str) -> tuple[Wire, ...]:
        """The cables that end at a host or switch."""
        return tuple(wire for wire in self.wires if place in (wire.one, wire.other))

    def sends_bps(self, host: str) -> float | None:
        """What a host can send over all its cables; None for as fast as it goes."""
        return _sum([wire.forth_bps if wire.one == host else wire.back_bps for wire in self.wires_at(host)])

    def receives_bps(self, host: str) -> float | None:
        """What a host can receive over all its cables; None for as fast as it goes."""
        return _sum([wire.back_bps if wire.one == host else wire.forth_bps for wire in self.wires_at(host)])


def _sum(rates_bps: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates_bps if rate is not None]
    return sum(known) if known and len(known) == len(rates_bps) else None


def star(rates_bps: Sequence[float | None]) -> Wiring:
    """Hosts `h0`, `h1`, ... on one switch; each has a rate, the same in and out. Raises ValueError where a rate is
    too low, or where there are too many hosts."""
    if not 1 <= len(rates_bps) <= MOST_HOSTS:
        raise ValueError(f"a lab has 1 to {MOST_HOSTS} hosts, not {len(rates_bps)}")
    if any(rate is not None and not LOWEST_RATE_BPS <= rate < math.inf for rate in rates_bps):
        raise ValueError(f"rates are in bit/s and at least {LOWEST_RATE_BPS:g}, got {list(rates_bps)}")
    hosts = tuple(f"h{i}" for i in range(len(rates_bps)))
    wires = tuple(Wire(host, "switch", rate, rate) for host, rate in zip(hosts, rates_bps, strict=True))
    ways = {(a, b): "switch" for a in hosts for b in hosts if a != b} | {("switch", b): b for b in hosts}
    return Wiring(hosts, ("switch",), wires, ways)


def of_cluster(cluster: ClusterSpec, scale: float = 1.0) -> Wiring:
    """The hosts, switches and cables of a cluster, in its order, every rate times `scale`.

    Raises `ClusterSpecError` where a lab cannot have so many hosts or a rate so low.
    """
    from autopar.spec.topology import Topology

    if not 0 < scale < math.inf:
        raise ValueError(f"scale: expected a factor above 0, got {scale}")
    names = tuple(host.name for host in cluster.all_hosts)
    if len(names) > MOST_HOSTS:
        raise ClusterSpecError(f"the cluster has {len(names)} hosts; a lab has at most {MOST_HOSTS}")
    wires = tuple(
        Wire(c.one, c.other, 8 * c.forth_bytes_per_s.value * scale, 8 * c.back_bytes_per_s.value * scale)
        for c in cluster.cables
    )
    for wire in wires:
        _check_rates(wire, scale)
    ends = dict.fromkeys(end for wire in wires for end in (wire.one, wire.other))
    switches = tuple(end for end in ends if end not in names)
    return Wiring(names, switches, wires, _ways(Topology(cluster)))


def _check_rates(wire: Wire, scale: float) -> None:
    lowest = min(rate for rate in (wire.forth_bps, wire.back_bps) if rate is not None)
    if lowest < LOWEST_RATE_BPS:
        scaled = f" at a scale of {scale:g}" if scale != 1 else ""
        raise ClusterSpecError(
            f"the cable between '{wire.one}' and '{wire.other}' would have {lowest / 1e6:g} Mbit/s{scaled}; "
            f"a lab shapes links of at least {LOWEST_RATE_BPS / 1e6:g} Mbit/s"
        )


def _ways(topology: Topology) -> dict[tuple[str, str], str]:
    """The next neighbour on the topology's path, for each place on it. Where two shortest ways pass through a switch,
    it takes one of them for all: a switch looks only at where a packet goes, not at where it comes from."""
    end_of = {data["link"].id: to for _, to, data in topology.graph.edges(data=True)}
    places = _places(topology)
    ways: dict[tuple[str, str], str] = {}
    for target in places:
        for source in places:
            nodes = [source, *(end_of[link.id] for link in topology.path(places[source], places[target]))]
            if source == target:
                continue
            # A path from rank to rank begins and ends at devices: only what lies between the hosts is the network.
            crossed = nodes[nodes.index(source, 1) if source in nodes[1:] else 0 : nodes.index(target) + 1]
            for here, there in pairwise(crossed):
                ways.setdefault((here, target), there)
    return ways


def _places(topology: Topology) -> dict[str, int | str]:
    """How the topology is asked for each host: by its name where it serves, else by its first rank."""
    places: dict[str, int | str] = {}
    for host in topology.cluster.all_hosts:
        first = next((place.rank for place in topology.ranks if place.host.name == host.name), host.name)
        places[host.name] = host.name if host.serves else first
    return places
