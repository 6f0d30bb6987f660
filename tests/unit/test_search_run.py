"""The search as a whole: what it promises of the plan that it returns."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import pytest

from autopar.cost_models import AnalyticCostModel, Estimate, optimizer_cost
from autopar.errors import InfeasibleError, PlanError
from autopar.search import (
    BUILDERS,
    Budget,
    Candidate,
    Evaluator,
    Problem,
    SearchResult,
    build_plan,
    search,
    search_result,
)
from autopar.search.constraints import Constraints
from autopar.search.evaluate import overflow_bytes
from autopar.search.seeds import is_hopeless
from autopar.spec.cluster import ClusterSpec
from autopar.spec.lines import read_lines as read
from autopar.spec.plan import Plan
from autopar.spec.summary import verdict
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

SMALL = Budget(evaluations=25)

CLUSTERS = {
    "four hosts": cpu_hosts(4),
    "slow network": cpu_hosts(3, "50 Mbit/s"),
    "two hosts of two": cpu_hosts(2, devices="2 x cpu"),
    "loopback": ClusterSpec.loads("hosts: [{name: a, devices: 4 x cpu}]"),
    "gpus": cpu_hosts(2, "25 Gbit/s", "4 x A100-80GB"),
    "one slow card": ClusterSpec.loads(
        "hosts: [{name: a, count: 3, devices: 1 x cpu}, {name: b, devices: 1 x cpu, bandwidth: 100 Mbit/s}]\n"
        "network: {bandwidth: 1 Gbit/s}"
    ),
}


def run(cluster: ClusterSpec, seed: int = 0, **given: object) -> SearchResult:
    graph = training_graph(MLP, rows=["0.weight"])
    settings = {"budget": SMALL, **given}
    return search_result(graph, cluster, Context(cluster.world_size), seed=seed, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_plan_is_never_predicted_slower_than_the_best_seed(name: str) -> None:
    plan = run(CLUSTERS[name]).plan
    assert plan.prediction is not None
    assert len(plan.alternatives) == len(BUILDERS)
    best = min(a.prediction.step_time_s for a in plan.alternatives)
    assert plan.prediction.step_time_s <= best * (1 + 1e-12)


def test_the_prediction_is_that_of_the_groups() -> None:
    """What is written into the plan is what its groups cost when they are lowered and priced again."""
    cluster = cpu_hosts(4)
    graph = training_graph()
    plan = search(graph, cluster, Context(4), budget=SMALL)
    again = Plan.loads(plan.model_dump_json())
    program = lower_plan(again.groups, graph, Context(4))
    estimate = AnalyticCostModel().predict(graph, program, Topology(cluster))
    assert estimate.prediction() == again.prediction


def test_local_improvement_finds_what_no_seed_has() -> None:
    """Where hosts have two ranks each, other buckets go through the levels better than those of any seed."""
    result = run(CLUSTERS["two hosts of two"], budget=Budget(evaluations=150))
    seeds = [c for c in result.candidates if c.name in BUILDERS]
    assert result.plan.prediction is not None
    assert result.plan.prediction.step_time_s < 0.95 * min(c.step_time_s for c in seeds)


def test_the_same_seed_gives_the_same_plan() -> None:
    first, again = (run(CLUSTERS["gpus"], seed=3) for _ in range(2))
    assert first.plan == again.plan
    assert [c.step_time_s for c in first.candidates] == [c.step_time_s for c in again.candidates]


def test_ties_go_to_fewer_groups() -> None:
    """Where compute hides everything, hundreds of groups are no better than a few."""
    graph = training_graph(flops=10**12)
    result = search_result(graph, cpu_hosts(4), Context(4), budget=SMALL)
    best = result.plan.prediction
    assert best is not None
    limit = min(a.prediction.step_time_s for a in result.plan.alternatives)
    tied = [c for c in result.candidates if c.step_time_s <= min(limit, best.step_time_s)]
    assert len(result.plan.groups) <= min(len(c.groups) for c in tied)


def test_alternatives_are_the_seeds_from_the_fastest_on() -> None:
    times = [a.prediction.step_time_s for a in run(cpu_hosts(4)).plan.alternatives]
    assert times == sorted(times)
    assert {a.name for a in run(cpu_hosts(4)).plan.alternatives} == set(BUILDERS)


def test_a_budget_is_kept() -> None:
    result = run(cpu_hosts(4), budget=Budget(evaluations=10))
    assert len([c for c in result.candidates if c.name == "searched"]) <= 10
    none = run(cpu_hosts(4), budget=Budget(time_s=0.0))
    assert all(c.name in BUILDERS for c in none.candidates)


def test_a_plan_names_what_the_search_had_no_time_for() -> None:
    stopped = Event()
    stopped.set()
    plan = run(cpu_hosts(4), budget=Budget(stop=stopped)).plan
    priced = {a.name for a in plan.alternatives}
    assert {"ddp", "sharded"} <= priced
    assert set(plan.left_out) == set(BUILDERS) - priced != set()
    assert f"no time to price {plan.left_out[0]}, " in verdict(plan)
    assert Plan.loads(plan.model_dump_json()) == plan
    assert run(cpu_hosts(4)).plan.left_out == ()


def test_fidelity_bounds_what_is_used() -> None:
    exact, rounded = (run(CLUSTERS["slow network"], fidelity=f).plan for f in ("exact", "rounded"))
    assert exact.fidelity == "exact"
    assert all(g.options.get("wire", "same") == "same" for g in exact.groups)
    assert rounded.fidelity == "rounded"
    assert exact.prediction is not None and rounded.prediction is not None
    # All is communication here, and half the bytes take half the time.
    assert rounded.prediction.step_time_s < 0.6 * exact.prediction.step_time_s


def test_without_an_optimizer_every_rank_keeps_its_replica() -> None:
    graph = training_graph()
    plan = search(graph, cpu_hosts(4), Context(4, has_optimizer=False), budget=SMALL)
    assert {g.strategy for g in plan.groups} == {"all_reduce"}


def test_an_optimizer_that_needs_whole_parameters_gets_them() -> None:
    plan = search(training_graph(), cpu_hosts(4), Context(4, elementwise_update=False), budget=SMALL)
    assert all(m.whole for g in plan.groups for m in g.members)


def test_one_rank_needs_no_search() -> None:
    graph = training_graph(dtypes=["float32", "bfloat16"])
    result = search_result(graph, cpu_hosts(1), Context(1))
    assert len(result.candidates) == 1
    assert [g.strategy for g in result.plan.groups] == ["all_reduce", "all_reduce"]
    assert result.plan.alternatives == ()
    assert "nothing to synchronize" in result.plan.groups[0].reason


def test_every_group_says_what_it_costs_and_what_else_would() -> None:
    for group in run(CLUSTERS["four hosts"]).plan.groups:
        assert "on the network" in group.reason
        assert "next best is" in group.reason or "gains nothing" in group.reason


def small_memory(size: str) -> ClusterSpec:
    return ClusterSpec.loads(
        f"{{hosts: [{{name: a, count: 4, devices: {{kind: cpu, memory: {size}}}}}], network: {{bandwidth: 1 Gbit/s}}}}"
    )


def test_memory_decides_where_replicas_do_not_fit() -> None:
    """24 MiB of parameters: replicas need four times that and the bucket; shards of the state need far less."""
    roomy, tight = (run(small_memory(size)).plan for size in ("1 GiB", "70 MiB"))
    assert roomy.prediction is not None and tight.prediction is not None
    assert roomy.prediction.peak_memory_bytes > 70 << 20 >= tight.prediction.peak_memory_bytes
    assert {g.strategy for g in tight.groups} != {"all_reduce"}
    notes = {a.name: a.note for a in tight.alternatives}
    assert "does not fit" in notes["ddp"]


@pytest.mark.parametrize(
    ("peaks_gib", "reserve", "hopeless"),
    [((82, 1), 0.0, False), ((68, 1), 0.4, False), ((97, 1), 0.0, True), ((1, 10), 0.0, True)],
)
def test_nothing_is_searched_where_a_device_is_too_small_by_far(
    peaks_gib: tuple[int, int], reserve: float, hopeless: bool
) -> None:
    """A device of 80 GiB beside one of 8 GiB: each is judged by what its own rank takes."""
    hosts = "[{name: a, devices: {kind: cpu, memory: 80 GiB}}, {name: b, devices: {kind: cpu, memory: 8 GiB}}]"
    cluster = ClusterSpec.loads(f"{{hosts: {hosts}, network: {{bandwidth: 1 Gbit/s}}}}")
    asked, context = Constraints(memory_reserve=reserve), Context(2).on(cluster)
    of = Problem(training_graph(), cluster, Topology(cluster), context, AnalyticCostModel(), constraints=asked)
    evaluate, peaks = Evaluator(of, SMALL), tuple(gib << 30 for gib in peaks_gib)
    estimate = Estimate(1.0, 1.0, 0.0, 0.0, (0, 0), (0, 0), peaks, 0.1, "guessed")
    evaluate.best = Candidate("leanest", (), estimate, overflow_bytes(of, peaks))
    assert is_hopeless(evaluate) == hopeless


def test_a_model_that_fits_nowhere_is_refused_with_the_gap() -> None:
    """Nothing but what helps is advised: the model has no activations, so that a smaller batch does not."""
    said = (
        r"no plan fits.*on rank \d \(cpu, 20\.0 MiB\), .* too much, and 2\.00 MiB of it .* free.*taken by .*parameters"
        r".*With this it fits: a model in bfloat16.*; or devices with [\d.]+ MiB each$"
    )
    with pytest.raises(InfeasibleError, match=said):
        run(small_memory("20 MiB"))


@pytest.mark.parametrize(("forbidden", "size"), [((), "50 KiB"), (("sharded_parameters",), "75 KiB")])
def test_smaller_groups_are_tried_before_memory_is_said_to_be_short(forbidden: tuple[str, ...], size: str) -> None:
    """Seeds of few groups gather, or pack, all 24 KiB of parameters at once, and exceed the memory by far."""
    graph = training_graph([(f"{i}.weight", (32, 32)) for i in range(6)])
    constraints = Constraints.of(forbid=forbidden)
    found = search_result(graph, small_memory(size), Context(4), constraints=constraints, budget=SMALL)
    assert found.chosen.feasible


def test_the_optimizer_counts() -> None:
    adam, sgd = (
        run(cpu_hosts(4), cost_model=AnalyticCostModel(optimizer_cost(name))).plan.prediction
        for name in ("AdamW", "SGD")
    )
    assert adam is not None and sgd is not None
    assert sgd.step_time_s < adam.step_time_s
    assert sgd.peak_memory_bytes < adam.peak_memory_bytes


def test_the_journal_holds_every_candidate_and_is_only_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    result = run(cpu_hosts(4), journal=path)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(result.candidates)
    assert json.loads(lines[0])["search"]["fidelity"] == "exact"
    # A line that was cut off is closed, and passed over when read.
    path.write_text(path.read_text() + '{"candidate": "cut o')
    again = run(cpu_hosts(4), journal=path)
    assert path.read_text().splitlines()[: len(lines)] == lines
    records = [r for r in read(path) if "candidate" in r]
    assert len(records) == len(result.candidates) + len(again.candidates)
    assert records[0]["prediction"]["step_time_s"] == result.candidates[0].step_time_s


def test_progress_is_told() -> None:
    told: list[tuple[str, int, float]] = []
    result = run(cpu_hosts(4), progress=lambda *news: told.append(news))
    assert [count for _, count, _ in told] == list(range(1, len(result.candidates) + 1))
    best = [seconds for _, _, seconds in told]
    assert best == sorted(best, reverse=True)


def test_a_named_plan_is_built_and_priced() -> None:
    graph = training_graph()
    plan = build_plan("zero1", graph, cpu_hosts(4), Context(4))
    assert plan.name == "zero1"
    assert {g.strategy for g in plan.groups} == {"partitioned_parameter_server"}
    assert plan.prediction is not None
    assert build_plan("ddp+bf16", graph, cpu_hosts(4), Context(4)).fidelity == "rounded"


def test_a_named_plan_that_cannot_be_is_refused() -> None:
    graph = training_graph()
    with pytest.raises(PlanError, match="did you mean 'zero1'"):
        build_plan("zero", graph, cpu_hosts(4), Context(4))
    with pytest.raises(PlanError, match='fidelity="rounded"'):
        build_plan("ddp+bf16", graph, cpu_hosts(4), Context(4), fidelity="exact")
    with pytest.raises(PlanError, match="needs the optimizer"):
        build_plan("PS", graph, cpu_hosts(4), Context(4, has_optimizer=False))
    with pytest.raises(PlanError, match=r"4 ranks.*the job has 2"):
        build_plan("ddp", graph, cpu_hosts(4), Context(2))
