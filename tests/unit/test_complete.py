"""What calibration adds to a cluster's description, and what it leaves alone."""

from __future__ import annotations

import pytest

from autopar.spec.calibration import Calibration, LinkTimes
from autopar.spec.cluster import ClusterSpec
from autopar.spec.complete import complete

GBIT = 125e6


def _measured(cluster: ClusterSpec, *rates: tuple[int, float, float]) -> Calibration:
    """(rank, Gbit/s from rank 0, Gbit/s to rank 0)"""
    links = [
        LinkTimes(sender=a, receiver=b, bytes_per_s=rate * GBIT, latency_s=1e-4)
        for rank, forth, back in rates
        for a, b, rate in ((0, rank, forth), (rank, 0, back))
    ]
    return Calibration(
        date="", hardware="", versions={}, cluster=cluster.fingerprint, backend="gloo", links=tuple(links)
    )


def test_hosts_that_are_alike_stay_one_entry() -> None:
    cluster = ClusterSpec.loads("{hosts: [{name: a, count: 4, devices: cpu}], network: 10GbE}")
    found = complete(cluster, _measured(cluster, (1, 9.31, 9.26), (2, 9.4, 9.3), (3, 9.1, 9.3)))
    (host,) = found.hosts
    assert host.count == 4
    assert host.bandwidth is not None
    assert host.bandwidth.send.value == pytest.approx(9.3 * GBIT)
    assert ClusterSpec.loads(found.to_yaml()).fingerprint.digest == found.fingerprint.digest


def test_a_slow_host_is_told_from_the_others() -> None:
    cluster = ClusterSpec.loads("{hosts: [{name: a, count: 3, devices: 2 x cpu}], network: 10GbE}")
    found = complete(cluster, _measured(cluster, (2, 9.3, 9.3), (4, 2.4, 1.2)))
    cards = {
        h.name: (h.bandwidth.send.value / GBIT, h.bandwidth.receive.value / GBIT) for h in found.hosts if h.bandwidth
    }
    assert cards == {"a-0": (9.3, 9.3), "a-1": (9.3, 9.3), "a-2": (1.2, 2.4)}
    assert [p.host.name for p in found.ranks] == [p.host.name for p in cluster.ranks]


@pytest.mark.parametrize(
    "text",
    [
        "{hosts: [{name: a, count: 2, devices: cpu}], network: {bandwidth: 1 Gbit/s}}",
        "{hosts: [{name: a, count: 2, devices: cpu, bandwidth: 1 Gbit/s}], network: 10GbE}",
        "{hosts: [{name: a, devices: 2 x cpu}]}",
    ],
)
def test_what_was_written_stays(text: str) -> None:
    cluster = ClusterSpec.loads(text)
    assert complete(cluster, _measured(cluster, (1, 0.7, 0.7))) == cluster
