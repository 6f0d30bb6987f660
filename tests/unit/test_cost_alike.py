"""What is worked out once for ranks that are alike: the same as for each rank by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from autopar.cost_models import AnalyticCostModel
from autopar.cost_models.alike import alike
from autopar.cost_models.flows import Ways
from autopar.errors import PlanError
from autopar.ops.base import Call
from autopar.ops.context import _rates
from autopar.ops.gradients import Pack
from autopar.ops.subgroups import Subgroups, all_subgroups
from autopar.ops.values import Setting, Work
from autopar.search.builders import BUILDERS, builder_named
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from autopar.testing.declared import work_differences
from tests.unit.synthetic import cpu_hosts, training_graph

MIXED = ClusterSpec.loads(
    "hosts: [{name: a, count: 2, devices: 3 x A100-80GB}, {name: b, devices: 2 x H100-80GB, bandwidth: 10 Gbit/s},\n"
    "        {name: s, devices: 0, serves: true}]\n"
    "network: {bandwidth: 25 Gbit/s, latency: 20 us}\n"
)
CLUSTERS = {
    "mixed": MIXED,
    "one host": ClusterSpec.loads("hosts: [{name: a, devices: 4 x cpu}]"),
    "hosts of two": cpu_hosts(3, devices="2 x cpu"),
    "racks in a row": ClusterSpec.loads(
        "hosts: [{name: a, count: 2, devices: 2 x cpu, switch: r0}, {name: b, devices: 2 x cpu, switch: r1},\n"
        "        {name: c, count: 2, devices: 1 x cpu, switch: r2, bandwidth: 5 Gbit/s}]\n"
        "network: {bandwidth: 10 Gbit/s, switches: [r0, r1, r2], links: [{between: [r0, r1], bandwidth: 20 Gbit/s},\n"
        "          {between: [r1, r2], bandwidth: 8 Gbit/s}]}\n"
    ),
    "no switch": ClusterSpec.loads(
        "hosts: [{name: a, devices: 2 x cpu}, {name: b, devices: 1 x cpu}]\n"
        "network: {links: [{between: [a, b], bandwidth: 1 Gbit/s}]}\n"
    ),
    "a cable besides": ClusterSpec.loads(
        "hosts: [{name: a, count: 3, devices: 2 x cpu}, {name: b, devices: 1 x cpu}]\n"
        "network: {bandwidth: 1 Gbit/s, switches: [core], links: [{between: [a-0, b], bandwidth: 40 Gbit/s}]}\n"
    ),
}
ODD = (("table", (1001, 7)), ("0.weight", (13, 5)), ("0.bias", (13,)), ("scale", (1,)), ("1.weight", (3, 64)))


def test_columns_that_are_equal_are_found_in_rows_of_any_kind() -> None:
    rows = [np.array([3, 1, 3, 3]), np.array([[0.5, 0.5, 0.5, 0.5], [1.0, 2.0, 1.0, 0.0]]), np.array([True] * 4)]
    first, of_column = alike(rows, 4)
    assert first.tolist() == [0, 1, 3]
    assert of_column.tolist() == [0, 1, 0, 2]
    first, of_column = alike([], 3)
    assert first.tolist() == [0]
    assert of_column.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("clips", [False, True])
def test_every_call_costs_each_rank_what_it_does_there(name: str, clips: bool) -> None:
    cluster = CLUSTERS[name]
    graph, n = training_graph(ODD, rows=["table"]), cluster.world_size
    context = Context(n, clips=clips).on(cluster)
    pricer = AnalyticCostModel().pricer(graph, Topology(cluster))
    backend = pricer.network.backend
    setting = Setting(n, pricer.optimizer.moved_tensors, backend.rounds, backend.sums)
    seen = 0
    for builder in BUILDERS:
        try:
            program = lower_plan(builder_named(builder)(graph.parameters, context, cluster), graph, context)
        except PlanError:
            continue
        for call in program.calls:
            issue_s = pricer.network.backend.issue_s if call.op.is_collective else 0.0
            each = [round(issue_s + r.seconds(call.op.work(call, i, setting)), 7) for i, r in enumerate(pricer.rates)]
            assert pricer.price(call).device_s.tolist() == each, (builder, call.op)
            seen += len(set(each)) > 1
    assert seen > 10


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("split", [False, True])
def test_traffic_is_that_of_each_message(name: str, split: bool) -> None:
    topology = Topology(CLUSTERS[name])
    n = topology.world_size
    subgroups: Subgroups = (tuple(range(0, n, 2)), tuple(range(1, n, 2))) if split else ()
    ways, sizes = Ways(topology), np.arange(1.0, n + 1)
    expected = {kind: np.zeros(len(ways.links)) for kind in ("ring", "from each", "to each")}
    for subgroup in all_subgroups(subgroups, n):
        for a, b in permutations(subgroup, 2):
            for link in ways.between(a, b):
                expected["from each"][link] += sizes[a]
                expected["to each"][link] += sizes[b]
                if b == subgroup[(subgroup.index(a) + 1) % len(subgroup)]:
                    expected["ring"][link] += sizes[a]
    assert ways.ring(subgroups)(sizes).tolist() == expected["ring"].tolist()
    assert ways.from_each(subgroups)(sizes).tolist() == expected["from each"].tolist()
    assert ways.to_each(subgroups)(sizes).tolist() == expected["to each"].tolist()
    of_pairs = {link.id for a, b in permutations(range(n), 2) for link in topology.path(a, b)}
    assert {link.id for link in ways.links[: ways.of_ranks]} == of_pairs
    among = [topology.latency_s(a, b) for s in all_subgroups(subgroups, n) for a, b in permutations(s, 2)]
    to_servers = [topology.latency_s(*way) for s in topology.servers for r in range(n) for way in ((r, s), (s, r))]
    assert ways.latency_s(subgroups) == pytest.approx(max(among, default=0.0))
    assert ways.latency_s(subgroups, served=True) == pytest.approx(max(among + to_servers, default=0.0))


@pytest.mark.parametrize("name", CLUSTERS)
def test_rates_are_those_of_the_best_way_to_another_host(name: str) -> None:
    topology = Topology(CLUSTERS[name])
    hosts = [place.host.name for place in topology.ranks]
    expected = []
    for host in hosts:
        others = [b for b, other in enumerate(hosts) if other != host] or topology.servers
        ways = [
            min(topology.bandwidth_bytes_per_s(x, y), topology.bandwidth_bytes_per_s(y, x))
            for x, y in ((hosts.index(host), b if isinstance(b, str) else hosts.index(hosts[b])) for b in others)
        ]
        expected.append(max(ways, default=0.0) / hosts.count(host))
    numbers = [hosts.index(host) for host in hosts]
    assert _rates(topology, numbers) == tuple(expected)


class First(Pack):
    """Packs gradients, and does something else besides on rank 0, of which it says nothing."""

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        return Work(moved_bytes=1e6) if rank == 0 else Work()


def test_an_operation_that_does_not_say_on_which_ranks_it_does_something_else_is_named() -> None:
    graph, context = training_graph(ODD), Context(4)
    program = lower_plan(builder_named("ddp")(graph.parameters, context, cpu_hosts(4)), graph, context)
    assert work_differences(program.calls, 4) == []
    pack = next(c for c in program.calls if isinstance(c.op, Pack))
    silent = replace(pack, op=First(pack.dtype))
    (said,) = work_differences([silent], 4)[:1]
    assert "its work on rank 1 is another than on rank 0, which holds as much" in said
