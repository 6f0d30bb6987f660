"""How many plans the cost model prices in a second, on one core: BERT-base on four hosts with a V100 each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from autopar.cost_models import AnalyticCostModel
from autopar.cost_models.bound import Bound
from autopar.errors import PlanError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.search.base import Problem
from autopar.search.builders import builder_named
from autopar.search.moves import Groups, Neighbourhood
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from benchmarks.harness import Report, Target, additions_us
from benchmarks.zoo.sizes import entries

CLUSTER = "hosts: [{name: host, count: 4, devices: V100-16GB}]\nnetwork: {kind: 25GbE}"
SIMULATED, BOUNDED = 300, 200_000
SIMULATIONS_PER_S, BOUNDS_PER_S = 500, 100_000


def fill(report: Report) -> None:
    """Two rows, and their targets."""
    bert = entries()[0]
    graph = training_graph(bert.build(), flatten(bert.batch(8, 0)), bert.loss_fn)
    cluster = ClusterSpec.loads(CLUSTER)
    context = Context(4).on(cluster)
    model = AnalyticCostModel()
    problem = Problem(graph, cluster, Topology(cluster), context, model, "exact")
    near = Neighbourhood(problem)
    groups = builder_named("ddp")(graph.parameters, context, cluster)
    programs = _walk(near, groups, SIMULATED)

    def simulate(by: AnalyticCostModel) -> None:
        for program in programs:
            by.predict(graph, program, problem.topology)

    first = _per_second(len(programs), lambda: simulate(AnalyticCostModel()))
    simulate(model)
    simulated = _per_second(len(programs), lambda: simulate(model))
    bound = Bound(model.pricer(graph, problem.topology))
    rows = [_rows(near, bound, group) for group in groups]
    draw = np.random.default_rng(0)
    plans = np.stack([draw.choice(offered, BOUNDED) for offered in rows], axis=1)
    bounded = _per_second(BOUNDED, lambda: bound.of(plans))
    report.notes.append(
        f"Speed, BERT-base ({len(graph.parameters)} parameters, {len(graph.compute)} nodes) on one core: "
        f"{simulated:,.0f} plans a second are simulated, lowered and their groups priced before, plans along a random "
        f"walk ({first:,.0f} the first time, when groups that no plan before had are priced too); {bounded:,.0f} are "
        f"bounded, of {len(groups)} groups each, with {sum(map(len, rows))} rows priced before. "
        "The machine's speed varies, by itself and by a factor of two: 100,000 additions in Python "
        f"took {1e-3 * additions_us():.1f} ms just then."
    )
    report.targets += [
        Target("speed: plans simulated a second", simulated, SIMULATIONS_PER_S, "at least"),
        Target("speed: plans bounded a second", bounded, BOUNDS_PER_S, "at least"),
    ]


def _walk(near: Neighbourhood, groups: Groups, count: int) -> list[StepProgram]:
    """Plans along a random walk, lowered; those that cannot be are passed over."""
    draw, found = random.Random(0), list[StepProgram]()
    while len(found) < count:
        changed = near.neighbour(groups, draw) or groups
        try:
            found.append(lower_plan(changed, near.problem.graph, near.problem.context))
        except PlanError:
            continue
        groups = changed
    return found


def _rows(near: Neighbourhood, bound: Bound, group: SyncGroup) -> Sequence[int]:
    graph, context = near.problem.graph, near.problem.context
    found: list[int] = []
    for offered in near.choices.values():
        for choice in offered:
            try:
                found.append(bound.add(lower_plan((choice.of(group),), graph, context)))
            except PlanError:
                continue
    return found


def _per_second(count: int, work: Callable[[], object]) -> float:
    """The best of three times, as others may come between."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return count / min(found)
