"""How much each rank owns, where links differ."""

from __future__ import annotations

import pytest

from autopar.search import build_plan, search
from autopar.search.base import Budget
from autopar.spec.cluster import ClusterSpec
from autopar.strategies import Context, strategy_named
from autopar.strategies.partitioned_parameter_server import balanced_shares
from tests.unit.synthetic import cpu_hosts, training_graph

SLOW_HOST = ClusterSpec.loads(
    "hosts: [{name: a, count: 3, devices: 1 x cpu}, {name: b, devices: 1 x cpu, bandwidth: 200 Mbit/s}]\n"
    "network: {bandwidth: 1 Gbit/s}"
)


def _done(rates: list[float], shares: tuple[float, ...]) -> list[float]:
    """When each rank has sent everything, gradients and parameters."""
    return [(1 + (len(rates) - 2) * s) / r for s, r in zip(shares, rates, strict=True)]


@pytest.mark.parametrize("rates", [[1, 1, 1, 1.2], [3, 2, 2, 2, 2], [1.0, 1.1, 1.2]])
def test_owners_are_done_at_the_same_time(rates: list[float]) -> None:
    shares = balanced_shares(rates)
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    assert min(shares) > 0
    done = _done(rates, shares)
    assert max(done) == pytest.approx(min(done), rel=1e-3)
    assert max(done) < max(_done(rates, (1 / len(rates),) * len(rates)))


def test_a_slow_rank_owns_nothing() -> None:
    assert balanced_shares([5, 5, 5, 1]) == (0.3333, 0.3333, 0.3333, 0.0)
    assert balanced_shares([4, 1, 1, 1]) == (1.0, 0.0, 0.0, 0.0)


def test_rates_are_those_of_the_cluster() -> None:
    assert Context(4).on(cpu_hosts(4)).rates == ()
    rates = Context(4).on(SLOW_HOST).rates
    assert rates == pytest.approx((125e6, 125e6, 125e6, 25e6))
    two_each = ClusterSpec.loads(
        "hosts: [{name: a, devices: 2 x cpu}, {name: b, devices: 1 x cpu}]\nnetwork: {bandwidth: 1 Gbit/s}"
    )
    assert Context(3).on(two_each).rates == pytest.approx((62.5e6, 62.5e6, 125e6))


def test_a_slow_host_is_spared() -> None:
    """It sends all gradients and receives all parameters, at once: 2/3 of a ring's time, and that of a bucket."""
    graph = training_graph()
    ring = build_plan("ddp", graph, SLOW_HOST, Context(4)).prediction
    spared = build_plan("zero1_by_rate", graph, SLOW_HOST, Context(4))
    found = search(graph, SLOW_HOST, Context(4), budget=Budget(evaluations=20))
    assert ring is not None and spared.prediction is not None and found.prediction is not None
    assert spared.groups[0].options["shares"] == (0.3333, 0.3333, 0.3333, 0.0)
    assert ring.step_time_s / spared.prediction.step_time_s > 1.2
    assert found.prediction.step_time_s <= spared.prediction.step_time_s


def test_no_reduce_passes_through_a_slow_host() -> None:
    servers = strategy_named("parameter_server")
    assert servers.options(Context(4).on(cpu_hosts(4)))
    assert not servers.options(Context(4).on(SLOW_HOST))
    assert servers.options(Context(4, elementwise_update=False).on(SLOW_HOST)), "shares are no way out there"
