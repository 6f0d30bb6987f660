"""The cluster as a graph: which links a message takes from rank to rank, how fast and how late.

Nodes are devices (`worker-0:0`), hosts, the interconnects within hosts, and switches; edges are the directions of
links, with `bandwidth_bytes_per_s` and `latency_s`. Transfers that cross the same edge at the same time share it.

    worker-0:0 -> worker-0 -> switch -> worker-1 -> worker-1:0            between hosts
    worker-0:0 -> worker-0/NVLink3 -> worker-0:1                          within one
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import networkx as nx

from autopar.errors import ClusterSpecError, did_you_mean
from autopar.spec.cluster import ClusterSpec
from autopar.spec.machines import Host
from autopar.spec.units import Figure, Provenance, weakest


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link."""

    id: str
    """Its two ends: `worker-0->switch`."""
    bandwidth_bytes_per_s: float
    latency_s: float
    """One way."""
    provenance: Provenance
    """The weaker of the two figures'."""


@lru_cache(maxsize=4)
def topology_of(cluster: ClusterSpec) -> Topology:
    """A cluster's topology, which several searches for it share."""
    return Topology(cluster)


class Topology:
    """The graph of a cluster, and the paths through it. Equal paths are computed once."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.ranks = cluster.ranks
        self.graph: nx.DiGraph[str] = nx.DiGraph()
        self._hosts = {host.name: host for host in cluster.all_hosts}
        self._between: dict[tuple[str, str], tuple[Link, ...]] = {}
        for host in self._hosts.values():
            self._add_host(host)
        for cable in cluster.cables:
            self._add(cable.one, cable.other, cable.forth_bytes_per_s, cable.latency_s)
            self._add(cable.other, cable.one, cable.back_bytes_per_s, cable.latency_s)
        ends = self._hosts.keys() | {end for cable in cluster.cables for end in (cable.one, cable.other)}
        self._network = nx.DiGraph(self.graph.subgraph(ends))
        self._switches = nx.DiGraph(self._network.subgraph(ends - self._hosts.keys()))

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the hosts that only serve, in the cluster's order."""
        return tuple(name for name, host in self._hosts.items() if host.serves and not host.devices)

    @property
    def links(self) -> tuple[Link, ...]:
        """All links of the cluster, each direction by itself."""
        return tuple(data["link"] for _, _, data in self.graph.edges(data=True))

    def path(self, a: int | str, b: int | str) -> tuple[Link, ...]:
        """The links that a message crosses from `a` to `b`, in order; empty where the two are the same. Each is a
        rank, or the name of a host that serves. Raises `ClusterSpecError` for a place that does not exist, and where
        there is no way."""
        host_a, node_a = self._place(a)
        host_b, node_b = self._place(b)
        if node_a == node_b:
            return ()
        if host_a == host_b:
            return self._within(host_a, node_a, node_b)
        return self.leave(a) + self.through(host_a, host_b) + self.enter(b)

    def leave(self, end: int | str) -> tuple[Link, ...]:
        """The links from a rank to its host, which a message to another host crosses first; none from a host."""
        host, node = self._place(end)
        return (self._link(node, host),) if node != host else ()

    def enter(self, end: int | str) -> tuple[Link, ...]:
        """The links to a rank from its host, which a message from another host crosses last; none to a host."""
        host, node = self._place(end)
        return (self._link(host, node),) if node != host else ()

    def through(self, a: str, b: str) -> tuple[Link, ...]:
        """The links between two hosts, by their names."""
        one, other = self.switch_of(a), self.switch_of(b)
        if one is not None and other is not None:
            return (self.cables(a)[0], *self._between_ends(one, other, (a, b)), self.cables(b)[1])
        return self._between_ends(a, b, (a, b))

    def switch_of(self, host: str) -> str | None:
        """The switch by which a host is joined to all others; `None` where it is joined to several things, or to
        another host."""
        after, before = self._network.succ[host], self._network.pred[host]
        if len(after) != 1 or len(before) != 1:
            return None
        (switch,) = after
        return switch if switch in before and switch not in self._hosts else None

    def cables(self, host: str) -> tuple[Link, Link]:
        """The links to the one switch of a host, and from it."""
        switch = self.switch_of(host)
        assert switch is not None, f"{host} is joined to several things"
        return self._link(host, switch), self._link(switch, host)

    def pairs(self, hosts: Iterable[str]) -> list[tuple[str, str]]:
        """Some pairs of these hosts, in both orders, that stand for all pairs: messages between any two hosts take
        links as fast as those between one of these pairs. Two hosts are alike where equal cables join them to the same
        switch, and their devices are equal."""
        kinds: dict[Hashable, list[str]] = {}
        for name in hosts:
            kinds.setdefault(self.kind_of(name), []).append(name)
        first_two = [each[:2] for each in kinds.values()]
        return [
            (one[0], other[-1 if one is other else 0])
            for one, other in product(first_two, repeat=2)
            if one is not other or len(one) == 2
        ]

    def kind_of(self, name: str) -> Hashable:
        """The same for hosts that are alike, as `pairs` takes them."""
        switch = self.switch_of(name)
        if switch is None:
            return name
        host, rates = self._hosts[name], [(c.bandwidth_bytes_per_s, c.latency_s) for c in self.cables(name)]
        return switch, host.devices, host.interconnect, *rates

    def _between_ends(self, a: str, b: str, hosts: tuple[str, str]) -> tuple[Link, ...]:
        """The links between two ends in the network, as messages between two hosts cross them."""
        if (a, b) not in self._between:
            self._between[a, b] = self._links(self._nodes_between(a, b, hosts)) if a != b else ()
        return self._between[a, b]

    def bandwidth_bytes_per_s(self, a: int | str, b: int | str) -> float:
        """The rate of the slowest link on the path from `a` to `b`; infinite where the two are the same."""
        return min((link.bandwidth_bytes_per_s for link in self.path(a, b)), default=math.inf)

    def latency_s(self, a: int | str, b: int | str) -> float:
        """The latencies of the links from `a` to `b`, added up."""
        return math.fsum(link.latency_s for link in self.path(a, b))

    def _add_host(self, host: Host) -> None:
        self.graph.add_node(host.name)
        link = host.interconnect
        into = out = f"{host.name}/{link.name}"
        if len(host.devices) > 1 and link.shared:
            into, out = f"{into}.in", f"{out}.out"
            self._add(into, out, link.bytes_per_s, link.latency_s)
        # A link's latency is from device to device: half of it on each of the two edges of such a path, unless the
        # edge that they share has it already.
        latency = replace(link.latency_s, value=0.0) if link.shared else _half(link.latency_s)
        for i, device in enumerate(host.devices):
            node, up = f"{host.name}:{i}", device.host_link
            self._add(node, host.name, up.bytes_per_s, _half(up.latency_s))
            self._add(host.name, node, up.bytes_per_s, _half(up.latency_s))
            if len(host.devices) > 1:
                self._add(node, into, link.bytes_per_s, latency)
                self._add(out, node, link.bytes_per_s, latency)

    def _add(self, a: str, b: str, bandwidth: Figure, latency: Figure) -> None:
        link = Link(f"{a}->{b}", bandwidth.value, latency.value, weakest(bandwidth, latency))
        self.graph.add_edge(a, b, link=link, bandwidth_bytes_per_s=bandwidth.value, latency_s=latency.value)

    def _link(self, a: str, b: str) -> Link:
        link: Link = self.graph.edges[a, b]["link"]
        return link

    def _links(self, nodes: list[str]) -> tuple[Link, ...]:
        return tuple(self._link(a, b) for a, b in pairwise(nodes))

    def _place(self, end: int | str) -> tuple[str, str]:
        """The host and the node of a rank, or of a serving host."""
        if isinstance(end, int):
            if not 0 <= end < len(self.ranks):
                raise ClusterSpecError(f"there is no rank {end}: the cluster has ranks 0 to {len(self.ranks) - 1}")
            place = self.ranks[end]
            return place.host.name, f"{place.host.name}:{place.local_rank}"
        if end not in self._hosts or not self._hosts[end].serves:
            serving = [host.name for host in self.cluster.serving_hosts]
            hint = did_you_mean(end, serving) or (f"; those are {', '.join(serving)}" if serving else "")
            raise ClusterSpecError(f"'{end}' is no host that serves{hint}")
        return end, end

    def _within(self, host: str, a: str, b: str) -> tuple[Link, ...]:
        if host in (a, b):
            return (self._link(a, b),)
        link = self._hosts[host].interconnect
        hub = f"{host}/{link.name}"
        return self._links([a, f"{hub}.in", f"{hub}.out", b] if link.shared else [a, hub, b])

    def _nodes_between(self, a: str, b: str, hosts: tuple[str, str]) -> list[str]:
        """Fewest links first, then the faster; never through another host. `hosts`: whose messages these are."""
        after, before = self._network.succ[a], self._network.pred[b]
        if b in after:
            return [a, b]
        common = [node for node in after if node in before and node not in self._hosts]
        if len(common) == 1:  # nearly always: one switch, or one a rack
            return [a, common[0], b]
        graph = self._switches
        ends = [end for end in (a, b) if end in self._hosts]
        if a in ends:
            graph.add_edges_from((a, node, data) for node, data in after.items() if node not in self._hosts)
        if b in ends:
            graph.add_edges_from((node, b, data) for node, data in before.items() if node not in self._hosts)
        try:
            return list(nx.shortest_path(graph, a, b, weight=_cost))
        except (nx.NetworkXNoPath, nx.NodeNotFound):
            raise ClusterSpecError(
                f"host '{hosts[0]}' cannot reach host '{hosts[1]}': join their switches in network.links"
            ) from None
        finally:
            graph.remove_nodes_from(ends)


def _cost(_: str, to: str, data: dict[str, Any]) -> float:
    return 1 + 1 / (1 + float(data["bandwidth_bytes_per_s"]))


def _half(latency_s: Figure) -> Figure:
    return replace(latency_s, value=latency_s.value / 2)
