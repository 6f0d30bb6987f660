"""The lower bound: never above the simulation, near it where nothing is hidden, and what the search makes of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.cost_models import AnalyticCostModel
from autopar.cost_models.bound import Bound
from autopar.search.base import Budget, Problem
from autopar.search.builders import builder_named
from autopar.search.evaluate import Evaluator
from autopar.search.moves import Neighbourhood
from autopar.search.searchers.recombine import Recombination
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph

SLOW_HOST = ClusterSpec.loads(
    "hosts: [{name: a, count: 3, devices: 1 x cpu}, {name: b, devices: 1 x cpu, bandwidth: 0.2 Gbit/s}]\n"
    "network: {bandwidth: 1 Gbit/s}"
)


def problem(cluster: ClusterSpec) -> Problem:
    context = Context(cluster.world_size, late_parameters=True).on(cluster)
    return Problem(training_graph(), cluster, Topology(cluster), context, AnalyticCostModel(), "rounded")


@pytest.mark.parametrize("cluster", [cpu_hosts(4), SLOW_HOST, cpu_hosts(2, devices="2 x cpu")], ids=str)
@pytest.mark.parametrize("name", ["ddp", "PS", "zero1", "hierarchical", "sharded"])
def test_no_step_is_shorter(cluster: ClusterSpec, name: str) -> None:
    of = problem(cluster)
    model = of.cost_model
    assert isinstance(model, AnalyticCostModel)
    bound, near, draw = Bound(model.pricer(of.graph, of.topology)), Neighbourhood(of), random.Random(name)
    groups = builder_named(name)(of.graph.parameters, of.context, cluster)
    for _ in range(25):
        rows = [bound.add(lower_plan((g,), of.graph, of.context)) for g in groups]
        step_s = model.predict(of.graph, lower_plan(groups, of.graph, of.context), of.topology).step_time_s
        low_s = bound.of([rows])[0]
        assert 0 < low_s <= step_s * (1 + 1e-9)
        groups = near.neighbour(groups, draw) or groups


@pytest.mark.parametrize("name", ["zero1", "all_reduce_one_bucket"])
def test_what_is_sent_behind_the_backward_pass_comes_on_top_of_the_compute(name: str) -> None:
    """Of a step that computes for 1.5 s and sends for 0.7 s, the busier one would be two thirds."""
    cluster = cpu_hosts(2, "300 Mbit/s")
    graph = training_graph(flops=10**10)
    context = Context(2).on(cluster)
    model = AnalyticCostModel()
    bound = Bound(model.pricer(graph, Topology(cluster)))
    groups = builder_named(name)(graph.parameters, context, cluster)
    low_s = bound.of([[bound.add(lower_plan((g,), graph, context)) for g in groups]])[0]
    step_s = model.predict(graph, lower_plan(groups, graph, context), Topology(cluster)).step_time_s
    assert 0.95 * step_s <= low_s <= step_s


def test_a_bound_of_many_is_that_of_each() -> None:
    of = problem(cpu_hosts(4))
    model = of.cost_model
    assert isinstance(model, AnalyticCostModel)
    bound, near = Bound(model.pricer(of.graph, of.topology)), Neighbourhood(of)
    groups = builder_named("ddp")(of.graph.parameters, of.context, of.cluster)
    offered = [
        [
            bound.add(lower_plan((c.of(g),), of.graph, of.context))
            for c in (*near.choices["all_reduce"], *near.choices["parameter_server"])
        ]
        for g in groups
    ]
    draw = np.random.default_rng(0)
    plans = np.array([[draw.choice(o) for o in offered] for _ in range(50)])
    together = bound.of(plans)
    assert together == pytest.approx([bound.of([plan])[0] for plan in plans.tolist()])
    assert len(set(together.tolist())) > 1


def test_recombining_finds_what_no_single_switch_does() -> None:
    """On a network that one group fills, all groups have to change before the step becomes shorter."""
    of = problem(SLOW_HOST)
    model = of.cost_model
    assert isinstance(model, AnalyticCostModel)
    evaluate = Evaluator(of, Budget(evaluations=200))
    ddp = evaluate("ddp", builder_named("all_reduce_1MiB")(of.graph.parameters, of.context, of.cluster))
    assert ddp is not None
    near = Neighbourhood(of)
    better = Recombination(evaluate, near, model.pricer(of.graph, of.topology)).improve(ddp, random.Random(0))
    assert better.step_time_s < 0.8 * ddp.step_time_s
    assert len(evaluate.candidates) <= 9
