"""The graph of a cluster: paths, rates and latencies between ranks."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from pathlib import Path

import networkx as nx
import pytest

from autopar.errors import ClusterSpecError
from autopar.spec.cluster import ClusterSpec, HostSpec, LinkSpec, NetworkSpec
from autopar.spec.cluster_checks import problems
from autopar.spec.topology import Topology

EXAMPLES = Path(__file__).parents[2] / "examples"
RACKS = """
hosts:
  - {name: a, count: 2, devices: 2 x A100-80GB, bandwidth: 200 Gbit/s, switch: left}
  - {name: b, devices: [T4, L4], bandwidth: {send: 10 Gbit/s, receive: 25 Gbit/s}, switch: right}
  - {name: s, serves: true, bandwidth: 50 Gbit/s, switch: core}
network:
  latency: 10 us
  switches: [left, {name: right, bandwidth: 20 Gbit/s, latency: 20 us}, core]
  links:
    - {between: [left, core], bandwidth: 100 Gbit/s, latency: 1 us}
    - {between: [right, core], bandwidth: 40 Gbit/s, latency: 2 us}
"""


def gbit(rate: float) -> float:
    return rate * 8 / 1e9


def test_one_switch() -> None:
    topology = Topology(ClusterSpec.load(EXAMPLES / "cluster.yaml"))
    path = topology.path(0, 3)
    assert [link.id for link in path] == [
        "worker-0:0->worker-0", "worker-0->switch", "switch->worker-3", "worker-3->worker-3:0",
    ]  # fmt: skip
    assert topology.bandwidth_bytes_per_s(0, 3) == 125e6
    assert topology.latency_s(0, 3) == pytest.approx(50e-6)
    assert [link.provenance for link in path] == ["guessed", "looked up", "looked up", "guessed"]


@pytest.mark.parametrize(
    ("a", "b", "rate"),
    [
        (0, 2, 200),  # one rack
        (0, 4, 20),  # up, over, and down to a slow port
        (4, 0, 10),  # and back through a slower card
        (0, "s", 50),
        ("s", 0, 50),
        ("s", 4, 20),
        (0, 1, 2400),  # NVLink
        (4, 5, gbit(15.754e9)),  # the slower of two PCIe generations
    ],
)
def test_the_slowest_link_counts(a: int | str, b: int | str, rate: float) -> None:
    topology = Topology(ClusterSpec.loads(RACKS))
    assert gbit(topology.bandwidth_bytes_per_s(a, b)) == pytest.approx(rate)


def test_latencies_add_up() -> None:
    topology = Topology(ClusterSpec.loads(RACKS))
    pcie = 5.7e-6
    # Half of each end's switch, both links between them, and the devices' own links to their hosts.
    assert topology.latency_s(0, 4) == pytest.approx(pcie / 2 + 5e-6 + 1e-6 + 2e-6 + 10e-6 + pcie / 2)
    assert topology.latency_s(0, 2) == pytest.approx(pcie + 10e-6)
    assert topology.latency_s(0, 1) == pytest.approx(3.4e-6)


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster-mixed.yaml"])
def test_every_path_is_a_walk_through_known_links(name: str) -> None:
    topology = Topology(ClusterSpec.load(EXAMPLES / name))
    known = {link.id: link for link in topology.links}
    assert len(known) == topology.graph.number_of_edges()
    ends: list[int | str] = [*range(topology.world_size), *(h.name for h in topology.cluster.serving_hosts)]
    for a, b in permutations(ends, 2):
        path = topology.path(a, b)
        assert all(known[link.id] is link for link in path)
        steps = [link.id.split("->") for link in path]
        assert all(here[1] == there[0] for here, there in pairwise(steps))
        hosts = {place.host.name for place in topology.ranks} | {h.name for h in topology.cluster.serving_hosts}
        passed = {step[1] for step in steps[:-1]} & hosts
        assert passed <= {_host(topology, a), _host(topology, b)}


def _host(topology: Topology, end: int | str) -> str:
    return end if isinstance(end, str) else topology.ranks[end].host.name


def test_edges_carry_their_figures() -> None:
    graph = Topology(ClusterSpec.loads(RACKS)).graph
    assert isinstance(graph, nx.DiGraph)
    for _, _, data in graph.edges(data=True):
        assert data["bandwidth_bytes_per_s"] == data["link"].bandwidth_bytes_per_s > 0
        assert data["latency_s"] == data["link"].latency_s >= 0


def test_ranks_of_one_cpu_host_share_loopback() -> None:
    topology = Topology(ClusterSpec.local(3))
    shared = {link.id for link in topology.path(0, 1)} & {link.id for link in topology.path(2, 1)}
    assert "localhost/loopback.in->localhost/loopback.out" in shared
    assert topology.latency_s(0, 1) == pytest.approx(30e-6)
    # Devices on a switch do not: their paths to different ranks have no link in common.
    gpus = Topology(ClusterSpec.loads("hosts: [{name: a, devices: 4 x A100-80GB}]"))
    assert not {link.id for link in gpus.path(0, 1)} & {link.id for link in gpus.path(2, 3)}


def test_a_rank_and_itself() -> None:
    topology = Topology(ClusterSpec.local(1))
    assert topology.path(0, 0) == ()
    assert (topology.bandwidth_bytes_per_s(0, 0), topology.latency_s(0, 0)) == (math.inf, 0.0)


def test_a_host_that_computes_and_serves() -> None:
    topology = Topology(ClusterSpec.loads("hosts: [{name: a, devices: 2 x T4, serves: true}]"))
    assert [link.id for link in topology.path(1, "a")] == ["a:1->a"]
    assert [link.id for link in topology.path("a", 1)] == ["a->a:1"]


def test_the_shorter_way_then_the_faster() -> None:
    cluster = ClusterSpec.loads(
        """
        hosts:
          - {name: a, devices: cpu, bandwidth: 10 Gbit/s, switch: left}
          - {name: b, devices: cpu, bandwidth: 10 Gbit/s, switch: right}
        network:
          bandwidth: 10 Gbit/s
          switches: [left, right, slow, fast]
          links:
            - {between: [left, slow], bandwidth: 1 Gbit/s}
            - {between: [slow, right], bandwidth: 1 Gbit/s}
            - {between: [left, fast]}
            - {between: [fast, right]}
        """
    )
    assert [link.id for link in Topology(cluster).path(0, 1)][1:-1] == [
        "a->left", "left->fast", "fast->right", "right->b",
    ]  # fmt: skip


def test_hosts_joined_by_cables_do_not_pass_on() -> None:
    hosts = tuple(HostSpec(name=name, devices="cpu") for name in "abc")

    def ring(*pairs: str) -> NetworkSpec:
        return NetworkSpec(bandwidth="1 Gbit/s", links=[LinkSpec(between=tuple(pair)) for pair in pairs])

    topology = Topology(ClusterSpec(hosts=hosts, network=ring("ab", "bc", "ca")))
    assert [link.id for link in topology.path(0, 2)][1:-1] == ["a->c"]
    with pytest.raises(ClusterSpecError, match="host 'a' cannot reach host 'c'"):
        ClusterSpec(hosts=hosts, network=ring("ab", "bc"))


def test_a_cut_network_names_both_hosts() -> None:
    # Built without checks, as no description can say it.
    whole = ClusterSpec.loads(RACKS)
    cut = whole.model_copy(update={"network": whole.network.model_copy(update={"links": whole.network.links[:1]})})
    topology = Topology(cut)
    (problem,) = problems(cut)
    assert problem.message.startswith("host 'a-0' cannot reach host 'b'; hosts do not pass on")
    with pytest.raises(ClusterSpecError, match="host 'a-1' cannot reach host 'b'"):
        topology.path(2, 4)
    assert topology.path(0, 2)


@pytest.mark.parametrize("rank", [-1, 6])
def test_there_is_no_such_rank(rank: int) -> None:
    with pytest.raises(ClusterSpecError, match=f"there is no rank {rank}: the cluster has ranks 0 to 5"):
        Topology(ClusterSpec.loads(RACKS)).path(0, rank)


def test_there_is_no_such_server() -> None:
    with pytest.raises(ClusterSpecError, match="'b' is no host that serves; those are s"):
        Topology(ClusterSpec.loads(RACKS)).path(0, "b")
