"""What must hold of a cluster description as a whole: names, devices, switches, links and a way between all hosts."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import did_you_mean
from autopar.spec.cluster_parts import ClusterParts
from autopar.spec.cluster_resolve import (
    DEFAULT_SWITCH,
    cables_of,
    host_cables_of,
    port_rate,
    switch_of,
    switches_of,
    world_size,
)
from autopar.spec.validation import Problem

MAX_RANKS = 8_192
"""In a plan or a cluster. Planning looks at the way between any two ranks, which takes hours for more."""
MAX_HOSTS = 1_024
"""In a cluster, likewise."""


def problems(cluster: ClusterParts) -> list[Problem]:
    """Everything that is wrong with the whole, though each part is right by itself; empty where nothing is."""
    found = list(_size(cluster)) or [*_names(cluster), *_switches(cluster), *_links(cluster), *_rates(cluster)]
    return found or list(_ways(cluster))


def _size(cluster: ClusterParts) -> Iterator[Problem]:
    if not cluster.hosts:
        yield Problem(("hosts",), "the list is empty; a cluster has at least one host")
    elif world_size(cluster) == 0:
        yield Problem(("hosts",), "no host has a device, so there is no rank; write for example 'devices: 1 x cpu'")
    hosts, ranks = sum(entry.count for entry in cluster.hosts), world_size(cluster)
    if hosts > MAX_HOSTS or ranks > MAX_RANKS:
        yield Problem(
            ("hosts",),
            f"{hosts} hosts with {ranks} devices are too many; "
            f"at most {MAX_HOSTS} hosts and {MAX_RANKS} devices can be planned for",
        )


def _names(cluster: ClusterParts) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for i, entry in enumerate(cluster.hosts):
        double = next((name for name in entry.names if name in taken), None)
        if double is not None:
            yield Problem(("hosts", i, "name"), f"'{double}' is the name of {taken[double]} already")
        if DEFAULT_SWITCH in entry.names and not cluster.network.switches:
            yield Problem(("hosts", i, "name"), f"'{DEFAULT_SWITCH}' is what the switch is called; take another name")
        taken |= dict.fromkeys(entry.names, f"hosts[{i}]")
    for i, switch in enumerate(cluster.network.switches):
        if switch.name in taken:
            place = ("network", "switches", i, "name")
            yield Problem(place, f"'{switch.name}' is the name of {taken[switch.name]} already")
        taken[switch.name] = f"network.switches[{i}]"


def _switches(cluster: ClusterParts) -> Iterator[Problem]:
    """Each host is on a switch of the network, or at the end of a link."""
    switches = switches_of(cluster)
    linked = {end for link in cluster.network.links for end in link.between}
    for i, entry in enumerate(cluster.hosts):
        if entry.switch is not None and entry.switch not in switches:
            known = f"it has {', '.join(switches)}" if cluster.network.switches else "list it in network.switches"
            hint = did_you_mean(entry.switch, switches) or f"; {known}"
            yield Problem(("hosts", i, "switch"), f"the network has no switch '{entry.switch}'{hint}")
        elif switch_of(cluster, entry) is None and not linked.issuperset(entry.names) and _several(cluster):
            how = f"give its switch, one of {', '.join(switches)}" if switches else "join it with network.links"
            yield Problem(("hosts", i), f"host '{entry.name}' is not in the network; {how}")


def _links(cluster: ClusterParts) -> Iterator[Problem]:
    """Each link joins two known things, no two links the same two, and has a rate."""
    ends = [name for entry in cluster.hosts for name in entry.names] + list(switches_of(cluster))
    plugged = {frozenset((cable.one, cable.other)) for cable in host_cables_of(cluster)}
    seen: dict[frozenset[str], int] = {}
    for i, link in enumerate(cluster.network.links):
        place = ("network", "links", i)
        one, other = link.between
        for end in link.between:
            if end not in ends:
                hint = did_you_mean(end, ends) or "; there is no host and no switch of that name"
                yield Problem((*place, "between"), f"'{end}' is unknown{hint}")
        if one == other:
            yield Problem((*place, "between"), f"the link joins '{one}' to itself")
        elif frozenset(link.between) in seen:
            first = f"network.links[{seen[frozenset(link.between)]}]"
            yield Problem(
                (*place, "between"), f"joins the same two as {first}; write one link with the sum of the rates"
            )
        elif frozenset(link.between) in plugged:
            yield Problem((*place, "between"), f"'{one}' and '{other}' are joined already: the host is on that switch")
        seen.setdefault(frozenset(link.between), i)
        if port_rate(cluster.network, link.bandwidth) is None:
            yield Problem(place, "the link has no bandwidth; give its own or the network's")


def _rates(cluster: ClusterParts) -> Iterator[Problem]:
    """The rate of the network is the one figure that nothing can be guessed for."""
    network = cluster.network
    for i, entry in enumerate(cluster.hosts):
        switch = switch_of(cluster, entry)
        if switch is None or not _several(cluster):
            continue
        if entry.bandwidth is None and port_rate(network, switch.bandwidth) is None:
            yield Problem(
                ("hosts", i),
                f"host '{entry.name}' has no bandwidth; write for example 'bandwidth: 1 Gbit/s' here, "
                "or 'network: 10GbE' for all hosts",
            )


def _ways(cluster: ClusterParts) -> Iterator[Problem]:
    """Every host reaches every other one."""
    neighbours: dict[str, set[str]] = {name: set() for entry in cluster.hosts for name in entry.names}
    hosts = list(neighbours)
    for cable in cables_of(cluster):
        neighbours.setdefault(cable.one, set()).add(cable.other)
        neighbours.setdefault(cable.other, set()).add(cable.one)
    # Hosts with the same neighbours reach the same hosts, so the first of them is asked.
    asked: dict[frozenset[str], str] = {}
    for name in hosts:
        asked.setdefault(frozenset(neighbours[name]), name)
    for one in asked.values():
        reached, frontier = {one}, [one]
        while frontier:
            new = neighbours[frontier.pop()] - reached
            reached |= new
            frontier += new - set(hosts)
        other = next((name for name in hosts if name not in reached), None)
        if other is not None:
            yield Problem(
                ("network",),
                f"host '{one}' cannot reach host '{other}'; hosts do not pass on what is meant for others: "
                "join their switches in network.links",
            )
            return


def _several(cluster: ClusterParts) -> bool:
    return sum(entry.count for entry in cluster.hosts) > 1
