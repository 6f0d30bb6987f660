"""A cluster description, completed from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from autopar.spec.cluster_parts import DuplexSpec, HostSpec
from autopar.spec.units import Figure

ALIKE = 0.1
"""Hosts of one entry whose rates differ by less than this fraction have the same one."""


def complete(cluster: ClusterSpec, calibration: Calibration) -> ClusterSpec:
    """The cluster, with the rates of hosts that it leaves open, or that nobody knew, as links were measured to reach.

    Links were measured to and from rank 0, so a host that is faster than rank 0's is taken for as fast. What was
    written stays: a calibration corrects it where it is used.
    """
    known = cluster.network.bandwidth
    rates = _rates(cluster, calibration)
    if not rates or (known is not None and known.provenance != "guessed"):
        return cluster
    hosts: list[HostSpec] = []
    for entry in cluster.hosts:
        found = [rates[name] for name in entry.names if name in rates]
        if entry.bandwidth is not None or len(found) < entry.count:
            hosts.append(entry)
        elif _alike([s for s, _ in found]) and _alike([r for _, r in found]):
            middle = median(s for s, _ in found), median(r for _, r in found)
            hosts.append(entry.model_copy(update={"bandwidth": _card(*middle)}))
        else:
            each = zip(entry.names, found, strict=True)
            hosts += [entry.model_copy(update={"name": n, "count": 1, "bandwidth": _card(*r)}) for n, r in each]
    return ClusterSpec(hosts=tuple(hosts), network=cluster.network)


def _rates(cluster: ClusterSpec, calibration: Calibration) -> dict[str, tuple[float, float]]:
    """Bytes per second that each host with a rank sends and receives; empty where there is but one."""
    host = {place.rank: place.host.name for place in cluster.ranks}
    between = [link for link in calibration.links if host[link.sender] != host[link.receiver]]
    sent = {host[link.sender]: link.bytes_per_s for link in between if link.receiver == 0}
    received = {host[link.receiver]: link.bytes_per_s for link in between if link.sender == 0}
    found = {name: (sent[name], received[name]) for name in sent.keys() & received.keys()}
    if found:
        found[host[0]] = max(received.values()), max(sent.values())
    return found


def _alike(rates: Sequence[float]) -> bool:
    return max(rates) <= (1 + ALIKE) * min(rates)


def _card(send: float, receive: float) -> DuplexSpec:
    if _alike((send, receive)):
        send = receive = min(send, receive)
    forth, back = (Figure(float(f"{8 * rate:.2g}") / 8, "measured") for rate in (send, receive))
    return DuplexSpec(send=forth, receive=back)
