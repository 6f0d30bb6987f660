"""What a lab lays out for a cluster: plain data, no root needed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from autopar.errors import ClusterSpecError
from autopar.lab.wiring import Wire, Wiring, of_cluster, star
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology

RACKS = """
hosts:
  - {name: big, count: 2, devices: 2 x A100-80GB, bandwidth: 40 Gbit/s, switch: rack-0}
  - {name: small, devices: 1 x L4, bandwidth: {send: 10 Gbit/s, receive: 25 Gbit/s}, switch: rack-1}
  - {name: server, serves: true, bandwidth: 100 Gbit/s, switch: rack-1}
network:
  switches: [rack-0, rack-1]
  links: [{between: [rack-0, rack-1], bandwidth: 50 Gbit/s}]
"""
RING = """
hosts: [{name: n, count: 4, devices: 1 x cpu}]
network:
  bandwidth: 10 Gbit/s
  links: [{between: [n-0, n-1]}, {between: [n-1, n-2]}, {between: [n-2, n-3]}, {between: [n-3, n-0]},
          {between: [n-0, n-2], bandwidth: 1 Gbit/s}, {between: [n-1, n-3], bandwidth: 1 Gbit/s}]
"""
TRIANGLE = """
hosts:
  - {name: a, devices: 1 x cpu, switch: s0}
  - {name: b, devices: 1 x cpu, switch: s1}
  - {name: c, devices: 1 x cpu, switch: s2}
network:
  bandwidth: 10 Gbit/s
  switches: [s0, s1, s2]
  links: [{between: [s0, s1]}, {between: [s1, s2]}, {between: [s2, s0]}]
"""
STAR = "hosts: [{name: w, count: 5, devices: 2 x cpu}]\nnetwork: 1GbE"


def test_rates_and_their_directions_are_the_clusters() -> None:
    wiring = of_cluster(ClusterSpec.loads(RACKS), scale=0.1)
    assert wiring.hosts == ("big-0", "big-1", "small", "server")
    assert wiring.switches == ("rack-0", "rack-1")
    assert wiring.wires == (
        Wire("big-0", "rack-0", 4e9, 4e9),
        Wire("big-1", "rack-0", 4e9, 4e9),
        Wire("small", "rack-1", 1e9, 2.5e9),
        Wire("server", "rack-1", 1e10, 1e10),
        Wire("rack-0", "rack-1", 5e9, 5e9),
    )
    assert (wiring.sends_bps("small"), wiring.receives_bps("small")) == (1e9, 2.5e9)


def _way(wiring: Wiring, source: str, target: str) -> list[str]:
    places = [source]
    while places[-1] != target:
        assert len(places) <= len(wiring.hosts) + len(wiring.switches), f"in circles: {places}"
        places.append(wiring.ways[places[-1], target])
    return places


@pytest.mark.parametrize(
    "text", [RACKS, RING, TRIANGLE, "hosts: [{name: w, count: 5, devices: 2 x cpu}]\nnetwork: 1GbE"]
)
def test_ways_are_those_that_are_priced(text: str) -> None:
    cluster = ClusterSpec.loads(text)
    wiring, topology = of_cluster(cluster), Topology(cluster)
    for one in cluster.ranks:
        for other in cluster.ranks:
            if one.host.name != other.host.name:
                priced = [link.id for link in topology.path(one.rank, other.rank)][1:-1]
                places = _way(wiring, one.host.name, other.host.name)
                assert [f"{a}->{b}" for a, b in pairwise(places)] == priced


def test_a_star() -> None:
    wiring = star([1e9, None])
    assert wiring.wires == (Wire("h0", "switch", 1e9, 1e9), Wire("h1", "switch", None, None))
    assert _way(wiring, "h1", "h0") == ["h1", "switch", "h0"]
    assert wiring.sends_bps("h1") is None


def test_a_host_by_itself_needs_no_cable() -> None:
    wiring = of_cluster(ClusterSpec.local(3))
    assert (len(wiring.hosts), wiring.wires, wiring.switches) == (1, (), ())


@pytest.mark.parametrize("rates", [[], [0.5e6], [float("inf")], [1e9] * 251])
def test_impossible_stars_are_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError, match=r"lab has 1 to 250|at least 1e\+06"):
        star(rates)


def test_impossible_clusters_are_refused() -> None:
    slow = "hosts: [{name: w, count: 2, devices: 1 x cpu}]\nnetwork: {bandwidth: 100 Mbit/s}"
    with pytest.raises(
        ClusterSpecError, match=r"'w-0' and 'switch' would have 0.1 Mbit/s at a scale of 0.001; .* 1 Mbit"
    ):
        of_cluster(ClusterSpec.loads(slow), scale=0.001)
    many = "hosts: [{name: w, count: 251, devices: 1 x cpu}]\nnetwork: 1GbE"
    with pytest.raises(ClusterSpecError, match=r"251 hosts; a lab has at most 250"):
        of_cluster(ClusterSpec.loads(many))
    with pytest.raises(ValueError, match="scale"):
        of_cluster(ClusterSpec.loads(many), scale=0)
