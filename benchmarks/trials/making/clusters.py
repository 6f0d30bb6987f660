"""The clusters of the data set: the suite's, and clusters of GPUs whose compute is slept through.

Hosts are renamed, so that clusters which differ in their rates alone run in one lab, on the same living ranks.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.spec.cluster import ClusterSpec
from autopar.spec.cluster_parts import HostSpec
from benchmarks.suite.clusters import CLUSTERS, ClusterCase

_GPUS = {
    "4xt4-10g": ("4 hosts with a T4 each at 10 Gbit/s", "{name: a, count: 4, devices: T4}", "10GbE"),
    "4xv100-25g": ("4 hosts with a V100 each at 25 Gbit/s", "{name: a, count: 4, devices: V100-16GB}", "25GbE"),
    "4-mixed-25g": (
        "2 hosts with an A100 and 2 with a V100 each at 25 Gbit/s",
        "{name: a, count: 2, devices: A100-40GB}, {name: b, count: 2, devices: V100-16GB}",
        "25GbE",
    ),
    "4xl4-slow-host": (
        "4 hosts with an L4 each, three at 10 Gbit/s and one at 2.5 Gbit/s",
        "{name: a, count: 3, devices: L4}, {name: b, devices: L4, bandwidth: 2.5 Gbit/s}",
        "10GbE",
    ),
    "8xv100-25g": ("8 hosts with a V100 each at 25 Gbit/s", "{name: a, count: 8, devices: V100-16GB}", "25GbE"),
    "2x4xt4-10g": ("2 hosts with 4 T4 each at 10 Gbit/s", "{name: a, count: 2, devices: 4 x T4}", "10GbE"),
}


def clusters() -> dict[str, ClusterCase]:
    """All of them, by name. Made anew on each call: the figures of CPU devices are this machine's."""
    found = dict(CLUSTERS)
    for name, (about, hosts, network) in _GPUS.items():
        spec = ClusterSpec.loads(f"{{hosts: [{hosts}], network: {{kind: {network}}}}}")
        found[name] = ClusterCase(name, about, lambda spec=spec: spec, virtual=True)  # type: ignore[misc]
    return {name: _made(case) for name, case in found.items()}


def _made(case: ClusterCase) -> ClusterCase:
    """The case with its cluster made once, and its hosts renamed."""
    cluster = renamed(case.cluster)
    return replace(case, build=lambda: cluster)


def renamed(cluster: ClusterSpec) -> ClusterSpec:
    """The same cluster, its hosts called `host-0`, `host-1`, ... in their order. No link may name a host."""
    hosts: list[HostSpec] = []
    for entry in cluster.hosts:
        for _ in range(entry.count):
            hosts.append(entry.model_copy(update={"name": f"host-{len(hosts)}", "count": 1}))
    new = ClusterSpec(hosts=tuple(hosts), network=cluster.network)
    assert new.fingerprint.digest == cluster.fingerprint.digest, "renaming changes no figure"
    return new
