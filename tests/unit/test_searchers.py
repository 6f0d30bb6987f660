"""The searchers: what each promises, and what the default is worth beside one that settles the question."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from autopar.cost_models import AnalyticCostModel
from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.base import CostModel, Estimate
from autopar.errors import AutoparWarning, PlanError
from autopar.ir.training_graph import TrainingGraph
from autopar.search import SEARCHERS, Budget, Candidate, Evaluator, Problem, SearchResult, search_result, searcher_named
from autopar.search.builders.common import issue_order, whole
from autopar.search.moves import Neighbourhood
from autopar.search.searchers import exhaustive, stretches
from autopar.search.searchers.borders import Borders, moved
from autopar.search.searchers.dynamic import Cuts
from autopar.search.searchers.evolutionary import crossed
from autopar.search.searchers.exhaustive import partitions
from autopar.search.searchers.random_plans import drawn
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import SyncGroup, partition_problems
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from tests.unit.synthetic import MLP, Layer, cpu_hosts, training_graph

SMALL: tuple[Layer, ...] = (("a", (512, 512)), ("b", (512,)), ("c", (2048, 512)))
SLOW_HOST = ClusterSpec.loads(
    "hosts: [{name: a, count: 2, devices: 1 x cpu}, {name: b, devices: 1 x cpu, bandwidth: 100 Mbit/s}]\n"
    "network: {bandwidth: 1 Gbit/s}"
)
WITHOUT_END = Budget(time_s=1e9, evaluations=10**9)


def problem(layers: tuple[Layer, ...] = SMALL, cluster: ClusterSpec = SLOW_HOST) -> Problem:
    graph = training_graph(layers)
    return Problem(graph, cluster, Topology(cluster), Context(cluster.world_size).on(cluster), AnalyticCostModel())


def found(
    name: str, layers: tuple[Layer, ...] = MLP, cluster: ClusterSpec = SLOW_HOST, evaluations: int = 80, seed: int = 0
) -> SearchResult:
    budget = WITHOUT_END if name == "exhaustive" else Budget(time_s=1e9, evaluations=evaluations)
    graph, context = training_graph(layers), Context(cluster.world_size)
    return search_result(graph, cluster, context, budget=budget, searcher=searcher_named(name), seed=seed)


def best(result: SearchResult) -> Candidate:
    return min((c for c in result.candidates if c.feasible), key=lambda c: c.step_time_s)


@pytest.mark.parametrize("name", [name for name in SEARCHERS if name != "exhaustive"])
def test_a_searcher_keeps_its_budget_and_gives_the_same_plan_again(name: str) -> None:
    once, again = found(name), found(name)
    seeds = [a.prediction.step_time_s for a in once.plan.alternatives]
    assert once.plan.prediction is not None and once.plan.prediction.step_time_s <= min(seeds)
    assert len(once.candidates) <= len(seeds) + 80
    assert [(c.groups, c.step_time_s) for c in once.candidates] == [(c.groups, c.step_time_s) for c in again.candidates]


def test_exhaustive_search_settles_what_the_best_plan_is() -> None:
    """Every plan of whole parameters, priced one by one without a bound."""
    of = problem()
    near = Neighbourhood(of)
    choices = [c for offered in near.choices.values() for c in offered]
    shortest_s, count = float("inf"), 0
    for parts in partitions(list(of.graph.parameters)):
        for chosen in product(choices, repeat=len(parts)):
            members = [tuple(whole(p)[0] for p in part) for part in parts]
            groups = [
                SyncGroup(strategy=c.strategy, members=m, options=dict(c.options))
                for c, m in zip(chosen, members, strict=True)
            ]
            if not all(near.possible(c, g) for c, g in zip(chosen, groups, strict=True)):
                continue
            program = lower_plan(issue_order(groups, of.graph.parameters), of.graph, of.context)
            shortest_s = min(shortest_s, of.cost_model.predict(of.graph, program, of.topology).step_time_s)
            count += 1
    result = found("exhaustive", SMALL)
    assert best(result).step_time_s <= shortest_s * (1 + 1e-12)
    assert len(result.candidates) < count, "the bound rules some of them out"


@pytest.mark.parametrize("bandwidth", ["50 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
def test_the_default_comes_near_the_best_plan_of_a_small_model(bandwidth: str) -> None:
    cluster = cpu_hosts(2, bandwidth)
    settled_s = best(found("exhaustive", SMALL, cluster)).step_time_s
    assert best(found("combined", SMALL, cluster, 300)).step_time_s <= 1.01 * settled_s


def test_an_exhaustive_search_that_is_cut_short_says_so() -> None:
    budget = Budget(time_s=1e9, evaluations=5)
    with pytest.warns(AutoparWarning, match="ended before all was settled"):
        search_result(
            training_graph(SMALL), SLOW_HOST, Context(3), budget=budget, searcher=searcher_named("exhaustive")
        )


@pytest.mark.parametrize("name", ["combined", "random", "annealing", "evolutionary", "stretches"])
def test_a_searcher_stops_where_nothing_new_is_left(name: str) -> None:
    """One parameter on two ranks has some dozens of plans, and the budget is far larger."""
    result = found(name, (("a", (64, 64)),), cpu_hosts(2), evaluations=10**9)
    assert len(result.candidates) < 1000


def test_stretches_find_in_few_plans_what_single_switches_need_many_for() -> None:
    """Of 60 layers beside a slow host, nearly all groups have to change before the step becomes much shorter."""
    layers = tuple((f"{i}.weight", (512, 512)) for i in range(60))
    few = best(found("stretches", layers, SLOW_HOST, evaluations=60)).step_time_s
    assert few <= best(found("random", layers, SLOW_HOST, evaluations=300)).step_time_s


def test_a_stretch_parts_the_groups_of_its_kind_alone() -> None:
    layers: tuple[Layer, ...] = (*((f"{i}.weight", (64, 64)) for i in range(40)), ("table", (1000, 64)))
    graph = training_graph(layers, rows=["table"])
    of = Problem(graph, SLOW_HOST, Topology(SLOW_HOST), Context(3).on(SLOW_HOST), AnalyticCostModel())
    evaluate = Evaluator(of, Budget(time_s=1e9, evaluations=10**9))
    over, draw = stretches._Over(evaluate, lambda: evaluate.spent), random.Random(0)
    for _ in range(50):
        candidate = evaluate("drawn", drawn(over.near, draw))
        if candidate is None:
            continue
        evaluate.best = candidate
        kinds = {over.near.kind(group): group for group in candidate.groups}
        for kind in kinds:
            begin, end = sorted((draw.random(), draw.random()))
            parts = over._parts(stretches._Stretch(kind, begin, end, ()))
            assert [m for g, _ in parts for m in g.members] == [m for g in candidate.groups for m in g.members]
            assert all(over.near.kind(g) == kind for g, inside in parts if inside)
            whole_plan = over._parts(stretches._Stretch(kind, 0.0, 1.0, ()))
            assert [g for g, _ in whole_plan] == list(candidate.groups)
            assert [inside for _, inside in whole_plan] == [over.near.kind(g) == kind for g in candidate.groups]


def test_borders_moved_together_find_what_single_ones_do_not() -> None:
    """Buckets of 64 layers: each border is moved by itself until that helps no more, then all at once."""
    of = problem(tuple((f"{i}.weight", (256, 256)) for i in range(64)), cpu_hosts(4))
    evaluate = Evaluator(of, WITHOUT_END)
    members = [whole(p)[0] for p in sorted(of.graph.parameters, key=lambda p: p.ready)]

    def price(borders: tuple[int, ...]) -> float:
        cuts = pairwise((0, *borders, len(members)))
        groups = (SyncGroup(strategy="all_reduce", members=tuple(members[i:j])) for i, j in cuts)
        candidate = evaluate("cut", issue_order(groups, of.graph.parameters))
        assert candidate is not None
        return candidate.step_time_s

    borders: tuple[int, ...] = (16, 32, 48)
    before = float("inf")
    while price(borders) < before:
        before = price(borders)
        near = [sorted({*borders[:i], at, *borders[i + 1 :]}) for i in range(3) for at in range(1, len(members))]
        borders = min((tuple(n) for n in near if len(n) == 3), key=price)
    Borders().search((), evaluate)
    assert evaluate.best is not None and evaluate.best.step_time_s < before


def test_borders_try_nothing_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one group: moving its borders again and again would take the time of other searchers."""
    of = problem(MLP)
    evaluate = Evaluator(of, WITHOUT_END)
    members = tuple(whole(p)[0] for p in of.graph.parameters)
    assert evaluate("one", (SyncGroup(strategy="all_reduce", members=members),)) is not None
    tried = 0

    def counted(*args: object) -> None:
        nonlocal tried
        tried += 1

    monkeypatch.setattr("autopar.search.searchers.borders.moved", counted)
    Borders().search((), evaluate)
    assert tried == 0


def test_exhaustive_search_trusts_no_bound_that_a_correction_undercuts() -> None:
    """A cost model that says a tenth of the simulation for one plan, and all of it for the others."""

    class Odd(CostModel):
        def __init__(self) -> None:
            self.base = AnalyticCostModel()

        def pricer(self, graph: TrainingGraph, topology: Topology) -> StepPricer:
            return self.base.pricer(graph, topology)

        def predict(
            self, graph: TrainingGraph, program: StepProgram, topology: Topology, *, timeline: bool = False
        ) -> Estimate:
            estimate = self.base.predict(graph, program, topology)
            part = 0.1 if [g.spec.strategy for g in program.groups] == ["parameter_server"] else 1.0
            return replace(estimate, step_time_s=part * estimate.step_time_s)

    cluster = cpu_hosts(2, "50 Mbit/s")
    graph = training_graph((("a", (512, 512)), ("b", (512, 512))), flops=10**6)
    result = search_result(
        graph, cluster, Context(2), budget=WITHOUT_END, searcher=searcher_named("exhaustive"), cost_model=Odd()
    )
    assert [g.strategy for g in best(result).groups] == ["parameter_server"]


def test_exhaustive_search_refuses_what_it_could_not_settle() -> None:
    with pytest.raises(PlanError, match="takes up to 8 parameters, the model has 12"):
        found("exhaustive", MLP)


def test_exhaustive_search_refuses_more_plans_than_it_could_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "MOST_PLANS", 100)
    with pytest.raises(PlanError, match=r"bounds up to 100 plans, the model has [1-9][\d,]+ on this cluster"):
        found("exhaustive", SMALL)


def test_exhaustive_search_bounds_plans_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = found("exhaustive", SMALL)
    monkeypatch.setattr(exhaustive, "BLOCK", 7)
    in_blocks = found("exhaustive", SMALL)
    assert [(c.groups, c.step_time_s) for c in in_blocks.candidates] == [
        (c.groups, c.step_time_s) for c in at_once.candidates
    ]


def test_exhaustive_search_bounds_nothing_where_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("plans were bounded")

    monkeypatch.setattr("autopar.search.searchers.exhaustive.Bound.of", refused)
    assert not exhaustive.Branches(Evaluator(problem(), Budget(time_s=0.0))).search()


def test_an_unknown_searcher_is_named() -> None:
    with pytest.raises(PlanError, match=r"no searcher is called 'gredy'.*greedy"):
        searcher_named("gredy")


def test_random_plans_and_children_and_moved_borders_hold_every_parameter_once() -> None:
    of = problem(MLP)
    near, draw = Neighbourhood(of), random.Random(0)
    plans = [drawn(near, draw) for _ in range(20)]
    plans += [crossed(draw.choice(plans), draw.choice(plans), near, draw) for _ in range(20)]
    plans += [moved(draw.choice(plans), 0.5, near, draw) for _ in range(20)]
    for groups in plans:
        assert partition_problems(groups, of.graph.model.parameters) == []
        lower_plan(groups, of.graph, of.context)
    assert len({len(groups) for groups in plans}) > 3


def test_cuts_hold_every_parameter_once_where_they_were_priced_before_in_equal_groups() -> None:
    of = problem(MLP)
    evaluate, near = Evaluator(of, WITHOUT_END), Neighbourhood(of)
    groups = tuple(
        SyncGroup(strategy="parameter_server" if "bias" in p.spec.name else "all_reduce", members=(whole(p)[0],))
        for p in of.graph.parameters
    )
    start = evaluate("start", groups)
    assert start is not None and of.pricer is not None
    cuts = Cuts(evaluate, near, of.pricer)
    cuts.improve(start)
    cuts.improve(replace(start, groups=tuple(g.model_copy() for g in groups)))
    assert [p for c in evaluate.candidates for p in partition_problems(c.groups, of.graph.model.parameters)] == []


def test_dynamic_programming_cuts_where_what_is_hidden_ends() -> None:
    """Gradients of one size, ready at even times, on a network that sends one while three become ready: nothing is
    gained by waiting for another one, but at the end."""
    layers = tuple((f"{i}", (256, 1024)) for i in range(12))
    of = problem(layers, cpu_hosts(2, "10 Gbit/s"))
    evaluate = Evaluator(of, Budget(time_s=1e9))
    one = evaluate("one", (SyncGroup(strategy="all_reduce", members=tuple(whole(p)[0] for p in of.graph.parameters)),))
    assert one is not None and of.pricer is not None
    cut = Cuts(evaluate, Neighbourhood(of), of.pricer).improve(one)
    assert cut.step_time_s < one.step_time_s
    assert len(cut.groups) > 1
    assert len(evaluate.candidates) <= 4, "a few plans are simulated, not all"
