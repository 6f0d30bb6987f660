"""Builds a wiring: namespaces, the cables between them, their rates and the ways through them.

Every host is a namespace whose interface `eth0` has its address. Virtual cables (veth pairs) lead to switches, which
are bridges in one more namespace. Each end of a cable is shaped by `tbf`, a token bucket, for what leaves there, so in
and out may differ. A host with several cables has a bridge of them as its `eth0`.

Ways are fixed: each bridge knows behind which cable a host lies, and hosts know each other's addresses. So nothing is
ever flooded, whatever loops the cables form, and no chatter shows in the counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from ipaddress import ip_interface

from autopar.lab.host import Host, shell
from autopar.lab.wiring import Wiring

_NETWORK = "_network"
"""The namespace of the switches; no host's name begins like that."""
_BURST_S, _BURST_BYTES = 0.002, 72 * 1024
_QUEUE_S, _MOST_QUEUED_BYTES = 0.05, 2**30
_CONGESTION = "reno"
"""How TCP finds its rate, whatever this machine's own connections do. Every Linux has it, and it keeps a link full
while something is queued. BBR, which some machines have by default, leaves off now and then to measure: with it, a ring
of 16 MB by 8 hosts at 250 Mbit/s takes 1.05 to 1.3 times its bytes over the rate; with Reno, 1.047 each time, of which
headers are 1.046. [Empirical]"""
_FIXED = "type bridge_slave learning off flood off mcast_flood off bcast_flood off"


def build(prefix: str, wiring: Wiring) -> tuple[Host, ...]:
    """Brings up hosts, switches and cables; returns the hosts. Raises RuntimeError where a command fails, and leaves
    what is there by then to the caller, as `lab_namespaces(prefix)`."""
    homes = _homes(prefix, wiring)
    for namespace in dict.fromkeys(homes.values()):
        shell(f"ip netns add {namespace}")
    commands = _Commands()
    ports = _lay_cables(wiring, homes, commands)
    for switch, device in _bridges(wiring).items():
        _add_bridge(switch, device, wiring, homes, ports, commands)
    for host in wiring.hosts:
        _set_up_host(host, wiring, homes, commands)
    commands.run()
    return tuple(
        Host(host, homes[host], address(i), "eth0")
        if wiring.wires_at(host)
        else Host(host, homes[host], "127.0.0.1", "lo")
        for i, host in enumerate(wiring.hosts)
    )


def set_rates(prefix: str, wiring: Wiring) -> None:
    """Gives the cables of a lab that is up the rates of `wiring`, which is its own in everything else."""
    commands = _Commands()
    _lay_cables(wiring, _homes(prefix, wiring), commands)
    commands.run(["tc"])


def _homes(prefix: str, wiring: Wiring) -> dict[str, str]:
    """The namespace of each host and switch."""
    return {host: f"{prefix}-{host}" for host in wiring.hosts} | dict.fromkeys(wiring.switches, f"{prefix}-{_NETWORK}")


def address(index: int) -> str:
    """The address of the host with this index."""
    return f"10.77.0.{index + 1}"


class _Commands:
    """Commands for `ip`, `tc` and `bridge`, run in one batch for each namespace and tool."""

    def __init__(self) -> None:
        self.cables: list[str] = []
        self._batches: defaultdict[tuple[str, str], list[str]] = defaultdict(list)

    def add(self, tool: str, namespace: str, *lines: str) -> None:
        self._batches[tool, namespace] += lines

    def run(self, tools: Sequence[str] = ("ip", "bridge", "tc")) -> None:
        if "ip" in tools:
            shell("ip -batch -", self.cables)
        for tool in tools:
            for (of_tool, namespace), lines in self._batches.items():
                if of_tool == tool:
                    shell(f"{tool} -n {namespace} -batch -", lines)


def _bridges(wiring: Wiring) -> dict[str, str]:
    """The switches, and the hosts with several cables, with the name of the bridge that each one is."""
    hosts = {host: "eth0" for host in wiring.hosts if len(wiring.wires_at(host)) > 1}
    return {switch: f"switch{i}" for i, switch in enumerate(wiring.switches)} | hosts


def _lay_cables(wiring: Wiring, homes: dict[str, str], commands: _Commands) -> dict[tuple[str, str], str]:
    """Adds the cables, with their rates; returns the device of each (place, neighbour)."""
    bridges = _bridges(wiring)
    ports = {}
    for i, wire in enumerate(wiring.wires):
        ends = []
        for which, here, there, rate_bps in (
            ("a", wire.one, wire.other, wire.forth_bps),
            ("b", wire.other, wire.one, wire.back_bps),
        ):
            device = f"port{i}{which}" if here in bridges else "eth0"
            hardware = "" if here in bridges else f" address {_hardware(wiring, here)}"
            ends.append((device, f"{hardware} netns {homes[here]}"))
            ports[here, there] = device
            if rate_bps is not None:
                commands.add("tc", homes[here], shaping(device, rate_bps))
        (one, at_one), (other, at_other) = ends
        commands.cables.append(f"link add name {one}{at_one} type veth peer name {other}{at_other}")
    return ports


def _add_bridge(
    place: str,
    device: str,
    wiring: Wiring,
    homes: dict[str, str],
    ports: dict[tuple[str, str], str],
    commands: _Commands,
) -> None:
    at = homes[place]
    hardware = f" address {_hardware(wiring, place)}" if place in wiring.hosts else ""
    commands.add("ip", at, f"link add name {device}{hardware} type bridge mcast_snooping 0")
    commands.add("ip", at, *_up(device))
    for port in (port for (here, _), port in ports.items() if here == place):
        commands.add("ip", at, f"link set dev {port} master {device}", f"link set dev {port} {_FIXED}", *_up(port))
    for (here, target), neighbour in wiring.ways.items():
        if here == place:
            hardware = _hardware(wiring, target)
            commands.add("bridge", at, f"fdb add {hardware} dev {ports[place, neighbour]} master static")


def _set_up_host(host: str, wiring: Wiring, homes: dict[str, str], commands: _Commands) -> None:
    at = homes[host]
    commands.add("ip", at, "link set dev lo up")
    if not wiring.wires_at(host):
        return
    commands.add("ip", at, *_up("eth0"))
    own = address(wiring.hosts.index(host))
    commands.add("ip", at, f"address add {own}/24 dev eth0")
    network = ip_interface(f"{own}/24").network
    commands.add("ip", at, f"route change {network} dev eth0 proto kernel scope link src {own} congctl {_CONGESTION}")
    for i, other in enumerate(wiring.hosts):
        if (host, other) in wiring.ways:
            commands.add(
                "ip", at, f"neighbour add {address(i)} lladdr {_hardware(wiring, other)} dev eth0 nud permanent"
            )


def _up(device: str) -> list[str]:
    """Without a generated address there is no IPv6, whose announcements the counters would show. It is generated when
    the device comes up, so that has to be a command of its own."""
    return [f"link set dev {device} addrgenmode none", f"link set dev {device} up"]


def _hardware(wiring: Wiring, host: str) -> str:
    return f"02:00:0a:4d:00:{wiring.hosts.index(host) + 1:02x}"


def shaping(device: str, rate_bps: float) -> str:
    """The `tc` command that limits what leaves through a device. It counts the headers of packets, as a cable does."""
    burst = burst_bytes(rate_bps)
    queue = min(burst + rate_bps / 8 * _QUEUE_S, _MOST_QUEUED_BYTES)
    return f"qdisc replace dev {device} root tbf rate {rate_bps:.0f}bit burst {burst} limit {queue:.0f}"


def burst_bytes(rate_bps: float) -> int:
    """What a link that was idle lets through at once, as its bucket is full: what arrives in 2 ms, or 72 KiB.

    With less, a busy processor comes too late to pass on what the rate allows, and a packet of 64 KiB,
    as the kernel moves them, has to be cut, which doubles the acknowledgements. With more, what follows a pause is
    faster than the rate. [Empirical: all-reduce of 1 MB by 4 hosts at 0.1, 0.2, 0.5, 1 Gbit/s, bursts of 16 to 256 KiB]
    """
    return max(_BURST_BYTES, round(rate_bps / 8 * _BURST_S))
