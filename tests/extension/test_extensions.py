"""What is written outside of the package is planned for, priced, run and counted like what is in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.cost_models.analytic import AnalyticCostModel
from autopar.ops.context import Context
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies import STRATEGIES, register
from autopar.strategies.lowering import lower_plan
from autopar.testing import check_strategy
from tests.extension.fixed_latency import FIXED_S, TOY
from tests.extension.recursive_doubling import RecursiveDoubling
from tests.unit.synthetic import MLP, cpu_hosts, training_graph


@pytest.fixture
def doubling() -> Iterator[str]:
    register(RecursiveDoubling())
    yield RecursiveDoubling.name
    del STRATEGIES[RecursiveDoubling.name]


def test_an_operation_of_ones_own_is_priced(doubling: str) -> None:
    """Twice the bytes of a ring at four ranks take the longer, where bandwidth decides; fewer rounds, where they do."""
    cluster, context = cpu_hosts(4), Context(4)
    for layers, quicker in ((MLP, "all_reduce"), ([("w", (4, 4))], doubling)):
        graph = training_graph(layers)
        members = tuple(ParameterSlice(name=name) for name, _ in layers)
        pricer = AnalyticCostModel().pricer(graph, Topology(cluster))
        times = {}
        for strategy in ("all_reduce", doubling):
            program = lower_plan([SyncGroup(strategy=strategy, members=members)], graph, context)
            times[strategy] = pricer.estimate(program).step_time_s
        assert min(times, key=times.__getitem__) == quicker


def test_an_operation_of_ones_own_runs_and_sends_what_it_declares() -> None:
    check_strategy(RecursiveDoubling, (1, 2, 4)).raise_if_broken()


def test_a_library_of_ones_own_is_planned_for_and_simulated() -> None:
    """Each of twelve collectives takes its fixed time, one after the other; one of all takes it once."""
    graph = training_graph(MLP, flops=1, bytes_moved=1)
    model, names = AnalyticCostModel(backend=TOY), [name for name, _ in MLP]
    times = []
    for groups in ([[name] for name in reversed(names)], [names]):
        specs = [
            SyncGroup(strategy="all_reduce", members=tuple(ParameterSlice(name=name) for name in some))
            for some in groups
        ]
        program = lower_plan(specs, graph, Context(4))
        times.append(model.predict(graph, program, Topology(cpu_hosts(4))).communication_s)
    assert times[0] - times[1] == pytest.approx((len(MLP) - 1) * FIXED_S, rel=0.2)
