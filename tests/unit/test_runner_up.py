"""The runner-up of each group: the best other strategy, priced in the whole plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autopar.cost_models import AnalyticCostModel, Estimate
from autopar.ir.training_graph import Parts, TrainingGraph
from autopar.search import Budget, build_plan, runner_up, search
from autopar.search import price as priced_again
from autopar.search.base import Problem
from autopar.search.constraints import Constraints
from autopar.search.moves import Neighbourhood
from autopar.search.reasons import Reasons
from autopar.search.runner_up import RunnersUp
from autopar.spec.plan import ParameterSlice, Plan, SyncGroup
from autopar.spec.summary import cost_text, group_rows
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

CLUSTER = cpu_hosts(4)
CONTEXT = Context(4)


def with_factors(rows: int = 128) -> TrainingGraph:
    """The gradients of the matrices are products of factors of so many rows."""
    graph = training_graph(MLP)
    parts = Parts("factors", (), rows, rows, 1024, 1024, -1, ())
    parameters = (
        replace(p, structure="factors", parts=parts) if len(p.spec.shape) == 2 else p for p in graph.parameters
    )
    return replace(graph, parameters=tuple(parameters))


class Counting(AnalyticCostModel):
    """Counts the plans that it prices."""

    priced = 0

    def predict(self, *given: object, **more: object) -> Estimate:
        self.priced += 1
        return super().predict(*given, **more)  # type: ignore[arg-type]


def price(groups: tuple[SyncGroup, ...], graph: TrainingGraph) -> float:
    context = CONTEXT.on(CLUSTER)
    return AnalyticCostModel().predict(graph, lower_plan(groups, graph, context), Topology(CLUSTER)).step_time_s


@pytest.mark.parametrize("name", ["structured", "all_reduce_10MiB"])
def test_its_price_is_that_of_the_plan_with_the_group_switched_and_no_strategy_is_better(name: str) -> None:
    graph = with_factors()
    plan = build_plan(name, graph, CLUSTER, CONTEXT)
    assert plan.prediction is not None
    near = Neighbourhood(Problem(graph, CLUSTER, Topology(CLUSTER), CONTEXT.on(CLUSTER), AnalyticCostModel()))
    for index, group in enumerate(plan.groups):
        found = group.runner_up
        assert found is not None and found.strategy != group.strategy

        def switched(strategy: str, options: Mapping[str, object], at: int) -> float:
            changed = SyncGroup.model_validate(
                {"strategy": strategy, "options": options, "members": plan.groups[at].members}
            )
            return price((*plan.groups[:at], changed, *plan.groups[at + 1 :]), graph)

        at = found.priced_group
        assert switched(found.strategy, dict(found.options), at) == found.step_time_s
        assert found.cost_s == found.step_time_s - plan.prediction.step_time_s
        if at == index:
            plainest = [(s, dict(c[0].options)) for s, c in near.choices.items() if near.possible(c[0], group)]
            others = [switched(s, options, at) for s, options in plainest if s != group.strategy]
            assert found.step_time_s <= min(others)


def test_groups_that_are_alike_share_one_answer_and_it_is_priced_once() -> None:
    plan = build_plan("all_reduce_4MiB", training_graph(), CLUSTER, CONTEXT)
    *alike, last = [g.runner_up for g in plan.groups]
    assert len(alike) == 5 and alike == [alike[0]] * 5
    assert alike[0] is not None and alike[0].priced_group == 2
    # Nothing that follows hides what the last group sends.
    assert last is not None and last.priced_group == 5
    assert "as priced for group 2 of 5 that are alike" in plan.groups[0].reason
    assert plan.groups[0].reason == plan.groups[2].reason != plan.groups[5].reason
    model = Counting()
    build_plan("all_reduce_4MiB", training_graph(), CLUSTER, CONTEXT, cost_model=model)
    few = model.priced
    model.priced = 0
    deep = training_graph([(f"{i}.{n}", s) for i in range(24) for n, s in MLP[:2]])
    build_plan("all_reduce_4MiB", deep, CLUSTER, CONTEXT, cost_model=model)
    assert model.priced == few


def test_without_time_the_largest_kinds_are_priced_and_the_others_say_that_they_were_not() -> None:
    layers = [(str(i), (64 * (i + 1), 64)) for i in range(6)]
    graph = training_graph(layers)
    problem = Problem(graph, CLUSTER, Topology(CLUSTER), CONTEXT.on(CLUSTER), AnalyticCostModel())
    plan = build_plan("PartitionedPS", graph, CLUSTER, CONTEXT)
    whole = tuple(SyncGroup(strategy="all_reduce", members=g.members) for g in plan.groups)
    estimate = problem.cost_model.predict(graph, lower_plan(whole, graph, problem.context), problem.topology)
    found = Reasons(problem).of(whole, estimate, 0.0)
    priced = [g for g in found if g.runner_up]
    sizes = sorted({group_bytes(g, graph) for g in whole})
    assert 3 <= len(priced) < len(whole) and max(group_bytes(g, graph) for g in priced) == sizes[-1]
    for group in found:
        assert ("was not priced" in group.reason) == (group.runner_up is None)


def test_where_pricing_takes_long_nothing_is_priced_beyond_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, now = training_graph(), 0.0
    problem = Problem(graph, CLUSTER, Topology(CLUSTER), CONTEXT.on(CLUSTER), AnalyticCostModel())
    groups = build_plan("all_reduce_4MiB", graph, CLUSTER, CONTEXT).groups
    estimate = problem.cost_model.predict(graph, lower_plan(groups, graph, problem.context), problem.topology)

    def alone_s(group: SyncGroup) -> float:
        nonlocal now
        now += 5.0
        return 1.0

    monkeypatch.setattr(runner_up, "time", SimpleNamespace(monotonic=lambda: now))
    assert RunnersUp(problem, Neighbourhood(problem), alone_s).of(groups, estimate, 0.2) == {}
    assert now == 5.0


def test_a_group_says_which_part_of_it_is_pinned() -> None:
    constraints = Constraints.of(pin={"*.bias": "all_reduce"})
    for group in build_plan("ddp", training_graph(), CLUSTER, CONTEXT, constraints=constraints).groups:
        biases, all_of = sum(m.name.endswith("bias") for m in group.members), len(group.members)
        assert 0 < biases < all_of
        assert f", {biases} of {all_of} pinned by *.bias=all_reduce: alone, " in group.reason
        assert group.reason.endswith("; the pin leaves the group no other strategy") and group.runner_up is None


def group_bytes(group: SyncGroup, graph: TrainingGraph) -> int:
    return sum(4 * m.shape(graph.by_name[m.name].spec)[0] * 64 for m in group.members)


def test_it_is_kept_in_the_file_and_changes_nothing_else() -> None:
    plan = search(with_factors(), CLUSTER, CONTEXT, budget=Budget(evaluations=10))
    assert all(g.runner_up for g in plan.groups)
    assert Plan.loads(plan.model_dump_json()) == plan
    data = json.loads(plan.model_dump_json())
    for group in data["groups"]:
        del group["runner_up"]
    older = Plan.loads(json.dumps(data))
    assert older.digest == plan.digest and older.basis == plan.basis and not older.was_edited
    assert all(row.runner_up is None for row in group_rows(older))
    assert "runner_up" not in older.model_dump_json()


def test_one_of_a_plan_that_was_edited_is_not_shown() -> None:
    plan = build_plan("ddp", training_graph(), CLUSTER, CONTEXT)
    assert all(row.runner_up for row in group_rows(plan))
    first = plan.groups[0].model_copy(update={"options": {"wire": "bfloat16"}})
    edited = plan.model_copy(update={"groups": (first, *plan.groups[1:])})
    assert edited.was_edited and not any(row.runner_up for row in group_rows(edited))


def test_a_switch_that_would_be_better_is_said_to_be() -> None:
    """Factors are a twelfth of what is sent on a slow network; a plan made by hand need not know."""
    members = {p.name: ParameterSlice(name=p.name) for p in with_factors(16).parameters}
    groups = [SyncGroup(strategy="all_reduce", members=(piece,)) for piece in reversed(members.values())]
    graph, slow = with_factors(16), cpu_hosts(4, "100 Mbit/s")
    by_hand = build_plan("ddp", graph, slow, CONTEXT).model_copy(update={"groups": tuple(groups)})
    for group in priced_again(by_hand, graph, slow, CONTEXT).groups:
        assert group.runner_up is not None
        if group.members[0].name.endswith("weight"):
            assert group.runner_up.strategy == "sufficient_factors" and group.runner_up.cost_s < 0
            assert "better would be sufficient_factors, -" in group.reason
    for group in build_plan("structured", graph, slow, CONTEXT).groups:
        if group.strategy == "sufficient_factors":
            assert group.runner_up is not None and group.runner_up.cost_s > 0
            assert f", {cost_text(group.runner_up)} a step" in group.reason


def test_one_that_does_not_fit_the_memory_is_none() -> None:
    """All state on one rank, or whole on each, exceeds the device; spread over the ranks, it does not."""
    plan = build_plan("sharded", training_graph(), CLUSTER, CONTEXT)
    assert plan.prediction is not None
    tight = plan.prediction.peak_memory_bytes + 1024
    cluster = cpu_hosts(4).model_copy()
    described = {
        "hosts": [{"name": "a", "count": 4, "devices": {"kind": "cpu", "memory": f"{tight} B"}}],
        "network": {"bandwidth": "1 Gbit/s"},
    }
    cluster = type(cluster).model_validate(described)
    groups = build_plan("sharded", training_graph(), cluster, CONTEXT).groups
    assert all(g.runner_up is None for g in groups)
    assert all("within the devices' memory" in g.reason for g in groups)


def test_timing_is_kept() -> None:
    """Averaged every four steps by all-reduces: the runner-up averages as seldom."""
    plan = build_plan("ddp+every=4", training_graph(), cpu_hosts(4, "100 Mbit/s"), CONTEXT)
    each_step = build_plan("ddp", training_graph(), cpu_hosts(4, "100 Mbit/s"), CONTEXT)
    assert each_step.prediction is not None
    for group in plan.groups:
        assert group.runner_up is not None
        assert group.runner_up.step_time_s < 0.6 * each_step.prediction.step_time_s


def test_one_rank_has_none() -> None:
    plan = build_plan("ddp", training_graph(), cpu_hosts(1), Context(1))
    assert all(g.runner_up is None for g in plan.groups)


def test_costs_have_a_sign() -> None:
    plan = build_plan("ddp", training_graph(), CLUSTER, CONTEXT)
    found = plan.groups[0].runner_up
    assert found is not None
    texts = [cost_text(found.model_copy(update={"cost_s": s})) for s in (0.0018, -0.012, 0.0)]
    assert texts == ["+1.80 ms", "-12.0 ms", "+0 s"]
