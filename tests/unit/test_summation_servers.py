"""Hosts that only serve: how much each adds up, what that puts on links, and when a plan has them."""

from __future__ import annotations

import pytest

from autopar.cost_models import AnalyticCostModel
from autopar.cost_models.network import Network
from autopar.errors import PlanError
from autopar.ops.collectives import served_bytes, wire_bytes
from autopar.ops.measured import collective_named
from autopar.search import build_plan, search
from autopar.search.base import Budget
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from autopar.strategies.summation_servers import balanced
from tests.unit.synthetic import cpu_hosts, training_graph

TWO_STRONG = ClusterSpec.loads(
    "hosts: [{name: worker, count: 4, devices: 1 x cpu, bandwidth: 1 Gbit/s}, "
    "{name: server, count: 2, serves: true, bandwidth: 2 Gbit/s}]"
)


def _done(rates: list[float], servers: list[float], shares: tuple[float, ...]) -> list[float]:
    """When each is done, in units of what the fastest rank takes for the bucket."""
    n = len(rates)
    ranks = [(1 + (n - 2) * s) * max(rates) / r for r, s in zip(rates, shares, strict=False)]
    return [*ranks, *(n * s / r for s, r in zip(shares[n:], servers, strict=True))]


@pytest.mark.parametrize("rates", [[1.0] * 4, [5.0, 5.0, 5.0, 1.0], [1.0, 2.0, 3.0], [2.0] * 8])
@pytest.mark.parametrize("servers", [[0.5], [1.0], [2.0, 2.0], [0.1, 3.0], [8.0, 8.0]])
def test_all_are_done_as_early_as_can_be(rates: list[float], servers: list[float]) -> None:
    shares = balanced(rates, servers)
    done = _done(rates, servers, shares)
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    assert min(shares) >= 0
    least = max(rates) / min(rates)  # a rank sends its whole bucket, whoever adds up
    assert max(done) >= least * 0.998
    if max(done) > least * 1.01:  # then nobody who adds up could take more and be done as early
        busy = [d for d, s in zip(done, shares, strict=True) if s > 1e-3]
        assert max(busy) == pytest.approx(min(busy), rel=1e-2)
        assert max(done) <= 2 * (len(rates) - 1) / len(rates) * least  # and a ring would take longer


def test_strong_servers_add_everything_up() -> None:
    assert balanced([1, 1, 1, 1], [2, 2]) == (0, 0, 0, 0, 0.5, 0.5)


def test_a_weak_server_only_helps() -> None:
    shares = balanced([1, 1, 1, 1], [1])
    assert shares[4] == pytest.approx(1 / 3, abs=1e-3)
    assert shares[:4] == pytest.approx([1 / 6] * 4, abs=1e-3)


def test_rates_are_those_of_the_servers_own_cards() -> None:
    context = Context(4).on(TWO_STRONG)
    assert [(s.name, s.rate) for s in context.servers] == [("server-0", 2.0), ("server-1", 2.0)]
    assert context.rates == ()
    assert Context(4).on(cpu_hosts(4)).servers == ()


def test_a_host_with_devices_is_no_server() -> None:
    text = "hosts: [{name: a, count: 2, devices: 1 x cpu, serves: true}]\nnetwork: {bandwidth: 1 Gbit/s}"
    assert Context(2).on(ClusterSpec.loads(text)).servers == ()


def test_links_carry_the_bytes_that_are_declared() -> None:
    network = Network(Topology(TWO_STRONG))
    split = (100_000, 0, 50_000, 30_000, 500_000, 320_000)
    p = collective_named("served_sum", sum(split), 4, sizes=split)
    on_link = dict(zip((link.id for link in network.links), network.phases(p)[0][1], strict=True))
    sent, received = wire_bytes(p, 4)
    for rank in range(4):
        assert on_link[f"worker-{rank}->switch"] == pytest.approx(sent[rank])
        assert on_link[f"switch->worker-{rank}"] == pytest.approx(received[rank])
    for server, served in enumerate(served_bytes(p, 4)):
        assert on_link[f"server-{server}->switch"] == pytest.approx(served)
        assert on_link[f"switch->server-{server}"] == pytest.approx(served)


def test_four_ranks_send_a_third_less() -> None:
    graph = training_graph()
    ring, served = (build_plan(name, graph, TWO_STRONG, Context(4)).prediction for name in ("ddp", "servers"))
    assert ring is not None and served is not None
    assert served.wire_bytes / ring.wire_bytes == pytest.approx(2 / 3, rel=1e-2)
    assert served.step_time_s < ring.step_time_s


def test_the_search_takes_servers_where_they_help() -> None:
    graph = training_graph()
    budget = Budget(evaluations=60)
    used = {g.strategy for g in search(graph, TWO_STRONG, Context(4), budget=budget).groups}
    assert "summation_servers" in used
    without = {g.strategy for g in search(graph, cpu_hosts(4), Context(4), budget=budget).groups}
    assert "summation_servers" not in without


def test_one_model_prices_other_shares_anew() -> None:
    """Where one rank adds everything up, its link is the slow one."""
    graph, topology = training_graph([("w", (4096, 4096))]), Topology(TWO_STRONG)
    context, model = Context(4).on(TWO_STRONG), AnalyticCostModel()
    times = []
    for shares in ((0.0,) * 4 + (0.5, 0.5), (1.0,) + (0.0,) * 5):
        group = SyncGroup(
            strategy="summation_servers", members=(ParameterSlice(name="w"),), options={"adds_up": shares}
        )
        times.append(model.predict(graph, lower_plan((group,), graph, context), topology).step_time_s)
    assert times[1] > 1.1 * times[0]


def test_shares_must_be_those_of_all_ranks_and_servers() -> None:
    graph = training_graph([("w", (4, 6))])
    members = (ParameterSlice(name="w"),)
    context = Context(4).on(TWO_STRONG)
    for shares, match in (((1.0,) * 4, "4 shares in adds_up, for 4 ranks and 2 hosts"), ((-1.0,) * 6, "not be neg")):
        group = SyncGroup(strategy="summation_servers", members=members, options={"adds_up": shares})
        with pytest.raises(PlanError, match=match):
            lower_plan([group], graph, context)
    with pytest.raises(PlanError, match="no host of the cluster only serves"):
        lower_plan([SyncGroup(strategy="summation_servers", members=members)], graph, Context(4))
