"""From what the user wrote to hosts, devices and cables with no figure missing.

What is left out comes from the library of devices and networks, and says so in its provenance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.spec.cluster_parts import ClusterParts, DeviceSpec, HostSpec, InterconnectSpec, NetworkSpec, SwitchSpec
from autopar.spec.devices import DEVICES, GUESSED_LATENCY, LINKS, NETWORKS, LinkKind, PeakFlops, like
from autopar.spec.machines import Cable, Device, Host
from autopar.spec.units import Figure, guess

DEFAULT_SWITCH = "switch"


def hosts_of(cluster: ClusterParts) -> tuple[Host, ...]:
    """Every host of the cluster by itself, in the order of the description."""
    return tuple(host for entry in cluster.hosts for host in _hosts(cluster, entry))


def world_size(cluster: ClusterParts) -> int:
    """The number of ranks: of devices over all hosts."""
    return sum(entry.count * sum(d.count for d in entry.devices) for entry in cluster.hosts)


def cables_of(cluster: ClusterParts) -> tuple[Cable, ...]:
    """Every cable of the network: from hosts to their switches, and the links."""
    return host_cables_of(cluster) + tuple(_links(cluster.network))


def host_cables_of(cluster: ClusterParts) -> tuple[Cable, ...]:
    """The cables from hosts to their switches."""
    found = ((_cable(cluster, entry, entry.name), entry) for entry in cluster.hosts)
    return tuple(replace(cable, one=name) for cable, entry in found if cable is not None for name in entry.names)


def switches_of(cluster: ClusterParts) -> Mapping[str, SwitchSpec]:
    """The switches of the network by name: those it lists, or one that joins all hosts."""
    network = cluster.network
    if not network.switches and not network.links:
        return {DEFAULT_SWITCH: SwitchSpec(name=DEFAULT_SWITCH)}
    return {switch.name: switch for switch in network.switches}


def switch_of(cluster: ClusterParts, entry: HostSpec) -> SwitchSpec | None:
    """The switch that the hosts of an entry are plugged into; None where only links join them."""
    switches = switches_of(cluster)
    if entry.switch is not None:
        return switches.get(entry.switch)
    return next(iter(switches.values())) if len(switches) == 1 else None


def port_rate(network: NetworkSpec, own: Figure | None) -> Figure | None:
    """The rate of a port or link: its own, else the network's, else that of the network's kind."""
    if own is not None or network.bandwidth is not None:
        return own or network.bandwidth
    return NETWORKS[network.kind].bytes_per_s if network.kind in NETWORKS else None


def port_latency(network: NetworkSpec, own: Figure | None) -> Figure:
    """The latency of a switch or link, likewise; guessed where nothing says it."""
    if own is not None or network.latency is not None:
        return own or network.latency or GUESSED_LATENCY
    return NETWORKS[network.kind].latency_s if network.kind in NETWORKS else GUESSED_LATENCY


def _cable(cluster: ClusterParts, entry: HostSpec, name: str) -> Cable | None:
    switch = switch_of(cluster, entry)
    if switch is None:
        return None
    port = port_rate(cluster.network, switch.bandwidth)
    card = entry.bandwidth
    send = _slower(card.send if card else None, port)
    receive = _slower(card.receive if card else None, port)
    if send is None or receive is None:
        return None
    latency = port_latency(cluster.network, switch.latency)
    # A path between two hosts on the switch has two such cables.
    return Cable(name, switch.name, send, receive, replace(latency, value=latency.value / 2))


def _links(network: NetworkSpec) -> list[Cable]:
    cables = []
    for link in network.links:
        rate = port_rate(network, link.bandwidth)
        if rate is not None:
            cables.append(Cable(*link.between, rate, rate, port_latency(network, link.latency)))
    return cables


def _slower(one: Figure | None, other: Figure | None) -> Figure | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=float)


def _hosts(cluster: ClusterParts, entry: HostSpec) -> Iterator[Host]:
    """The hosts of an entry, which differ in their names alone."""
    cable = _cable(cluster, entry, entry.name)
    first = _host(entry, entry.name, cable)
    for name in entry.names:
        yield replace(first, name=name, cable=cable and replace(cable, one=name))


def _host(entry: HostSpec, name: str, cable: Cable | None) -> Host:
    cpu = DEVICES["cpu"]
    devices = tuple(_device(spec) for spec in entry.devices for _ in range(spec.count))
    return Host(
        name=name,
        devices=devices,
        interconnect=_interconnect(entry),
        serves=bool(entry.serves),
        memory_bytes=entry.memory or cpu.memory_bytes,
        memory_bytes_per_s=entry.memory_bandwidth or cpu.memory_bytes_per_s,
        cable=cable,
    )


def _device(spec: DeviceSpec) -> Device:
    kind = like(spec.kind)
    return Device(
        kind=spec.kind,
        memory_bytes=spec.memory or kind.memory_bytes,
        memory_bytes_per_s=spec.memory_bandwidth or kind.memory_bytes_per_s,
        peak_flops=_peak_flops(spec, kind.peak_flops),
        host_link=LINKS[kind.host_link],
        batch=spec.batch,
    )


def _peak_flops(spec: DeviceSpec, library: PeakFlops) -> PeakFlops:
    """The user's figures, then the library's; for a kind that it does not know, guesses from float32."""
    written = spec.peak_flops
    if written is None:
        return library
    float32 = written.float32 or library.float32
    if spec.kind not in DEVICES:
        short = written.bfloat16 or written.float16
        short = guess(short.value if short else float32.value)
        library = PeakFlops(guess(float32.value / 2), float32, short, short)
    return PeakFlops(
        written.float64 or library.float64,
        float32,
        written.bfloat16 or library.bfloat16,
        written.float16 or library.float16,
    )


def _interconnect(entry: HostSpec) -> LinkKind:
    """As written, else the slowest of those that the devices come with."""
    spec = entry.interconnect or InterconnectSpec()
    defaults = [LINKS[like(d.kind).interconnect] for d in entry.devices]
    slowest = min(defaults, key=lambda link: float(link.bytes_per_s), default=LINKS["loopback"])
    link = LINKS.get(spec.kind, slowest) if spec.kind else slowest
    return replace(
        link,
        name=spec.kind or link.name,
        bytes_per_s=spec.bandwidth or link.bytes_per_s,
        latency_s=spec.latency or link.latency_s,
        shared=link.shared if spec.shared is None else spec.shared,
    )
