"""A cluster in words: one line of summary, a digest of all that a plan depends on, and how two clusters differ."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby

from autopar.spec.devices import DTYPES
from autopar.spec.machines import Cable, Host
from autopar.spec.units import DURATION, FLOP_RATE, MEMORY_RATE, NETWORK_RATE, SIZE, Dimension, Figure, rounded, text

Machines = tuple[tuple[Host, ...], tuple[Cable, ...]]
"""The hosts and the cables of a cluster."""

Things = dict[tuple[str, ...], dict[str, str]]
"""Hosts (`("host 3",)`) and cables (`("host 3", "switch 0")`), and their properties: exact, without provenance. Hosts
and switches go by position: their names, and whether a figure was measured, change no plan."""


def summary(hosts: Sequence[Host], cables: Sequence[Cable]) -> str:
    """One line: `4 hosts x 1 cpu, 1 Gbit/s`; `2 hosts x 8 A100-80GB + 1 serving host, 10 Gbit/s to 25 Gbit/s`."""
    groups = Counter(_equipment(host) for host in hosts)
    parts = [
        f"{n} host{'s' * (n > 1)} x {equipment}" if equipment else f"{n} serving host{'s' * (n > 1)}"
        for equipment, n in groups.items()
    ]
    return ", ".join([" + ".join(parts), *_speed(hosts, cables)])


def batches(hosts: Sequence[Host]) -> str:
    """The batch of each rank, where devices say it: `32 on each of 2 A100-80GB, 8 on 1 T4`; empty where none does."""
    devices = [d for host in hosts for d in host.devices]
    if all(d.batch is None for d in devices):
        return ""
    counts = Counter((d.batch, d.kind) for d in devices)
    return ", ".join(
        f"{'as in the example' if batch is None else batch} on {'each of ' * (n > 1)}{n} {kind}"
        for (batch, kind), n in counts.items()
    )


def digest(machines: Machines) -> str:
    """A hash over everything that a plan may depend on, but for the ranks' batches, with which any plan runs."""
    things = sorted((key, sorted(said.items())) for key, said in _things(machines).items())
    return hashlib.sha256(json.dumps(things).encode()).hexdigest()[:16]


def difference(one: Machines, other: Machines) -> list[str]:
    """How `other` differs from `one`, in words; empty exactly where their digests are the same."""
    mine, theirs = _things(one), _things(other)
    names = {label: name for machines in (other, one) for name, label in _labels(machines).items()}
    lines = []
    for key in mine | theirs:
        thing = f"host '{names[key[0]]}'" if len(key) == 1 else f"the cable from '{names[key[0]]}' to '{names[key[1]]}'"
        if key in mine and key in theirs:
            lines += [f"{thing}: {change}" for change in _changes(mine[key], theirs[key])]
        elif len(key) == 1 or all((end,) in mine and (end,) in theirs for end in key if end.startswith("host")):
            lines.append(f"{thing} is only in {'this' if key in mine else 'the other'} cluster")
    return lines


def _changes(here: dict[str, str], there: dict[str, str]) -> list[str]:
    """The properties that differ; not those that follow from other devices."""
    if here.get("devices") != there.get("devices"):
        here = {which: value for which, value in here.items() if not which.startswith(("device ", "interconnect "))}
    return [
        f"{which} {value}, in the other cluster {there[which]}"
        for which, value in here.items()
        if which in there and there[which] != value
    ]


def _equipment(host: Host) -> str:
    kinds = Counter(device.kind for device in host.devices)
    listed = " + ".join(f"{n} {kind}" for kind, n in kinds.items())
    return f"({listed})" if len(kinds) > 1 else listed


def _speed(hosts: Sequence[Host], cables: Sequence[Cable]) -> list[str]:
    rates = [float(r) for c in cables for r in (c.forth_bytes_per_s, c.back_bytes_per_s)]
    if len(hosts) == 1:
        return [hosts[0].interconnect.name] if len(hosts[0].devices) > 1 else []
    slowest, fastest = rounded(min(rates), NETWORK_RATE), rounded(max(rates), NETWORK_RATE)
    return [slowest if slowest == fastest else f"{slowest} to {fastest}"]


def _labels(machines: Machines) -> dict[str, str]:
    """Names of hosts and switches to their positions: `host 0`, `switch 0`."""
    hosts, cables = machines
    labels = {host.name: f"host {i}" for i, host in enumerate(hosts)}
    n_hosts = len(labels)
    for cable in cables:
        for end in (cable.one, cable.other):
            labels.setdefault(end, f"switch {len(labels) - n_hosts}")
    return labels


def _things(machines: Machines) -> Things:
    labels = _labels(machines)
    hosts, cables = machines
    known: dict[tuple[int, bool], dict[str, str]] = {}  # equal hosts of one entry share their devices
    things: Things = {}
    for host in hosts:
        alike = id(host.devices), host.serves
        if alike not in known or not host.devices:
            known[alike] = _host_properties(host)
        things[(labels[host.name],)] = known[alike]
    for cable in cables:
        if len(hosts) > 1:
            things[labels[cable.one], labels[cable.other]] = {
                "rate": _plain(cable.forth_bytes_per_s, NETWORK_RATE),
                "rate back": _plain(cable.back_bytes_per_s, NETWORK_RATE),
                "latency": _plain(cable.latency_s, DURATION),
            }
    return things


def _host_properties(host: Host) -> dict[str, str]:
    devices, link = host.devices, host.interconnect
    said = {"devices": _runs((d.kind for d in devices), counted=True), "serves": "true" if host.serves else "false"}
    if devices:
        said["device memory"] = _runs(_plain(d.memory_bytes, SIZE) for d in devices)
        said["device memory bandwidth"] = _runs(_plain(d.memory_bytes_per_s, MEMORY_RATE) for d in devices)
        said["device link to the host"] = _runs(_plain(d.host_link.bytes_per_s, MEMORY_RATE) for d in devices)
        for dtype in DTYPES:
            said[f"device peak in {dtype}"] = _runs(_plain(d.flops_per_s(dtype), FLOP_RATE) for d in devices)
    if len(devices) > 1:
        said["interconnect bandwidth"] = _plain(link.bytes_per_s, MEMORY_RATE)
        said["interconnect latency"] = _plain(link.latency_s, DURATION)
        said["interconnect shared"] = "true" if link.shared else "false"
    if host.serves:
        said["memory"] = _plain(host.memory_bytes, SIZE)
        said["memory bandwidth"] = _plain(host.memory_bytes_per_s, MEMORY_RATE)
    return said


def _plain(figure: Figure, dimension: Dimension) -> str:
    return _written(figure.value, dimension)


@lru_cache(maxsize=4096)
def _written(value: float, dimension: Dimension) -> str:
    """`text`, once for each of the few values that many hosts share."""
    return text(value, dimension)


def _runs(values: Iterable[str], *, counted: bool = False) -> str:
    """`2 x 80 GiB, 1 x 24 GiB`; for equal ones, unless `counted`, just `80 GiB`."""
    runs = [(value, sum(1 for _ in run)) for value, run in groupby(values)]
    if len(runs) == 1 and not counted:
        return runs[0][0]
    return ", ".join(f"{n} x {value}" for value, n in runs) or "none"
