"""What changes the decision: a plan under another bandwidth, batch and number of hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from autopar.cost_models import AnalyticCostModel, CorrectedCostModel, cost_model_for
from autopar.cost_models.base import Lesson
from autopar.cost_models.calibrated import measured
from autopar.cost_models.carried import carried_calibration, carried_model
from autopar.cost_models.network import Network
from autopar.errors import ClusterSpecError, PlanMismatchError
from autopar.ir.scaled_batch import scaled, why_not
from autopar.ir.training_graph import TrainingGraph
from autopar.report.what_if import what_if_text
from autopar.runtime.compiled import Settings
from autopar.search import Budget, build_plan, search
from autopar.search.base import SEARCHED, executed
from autopar.search.circumstances import HALF, TWICE, with_bandwidth, with_hosts
from autopar.search.constraints import MEMORY_RESERVE, Constraints
from autopar.search.run import search_result
from autopar.search.sensitivity import UNTAUGHT, Outcome, Sensitivity, sensitivity
from autopar.spec.calibration import LinkTimes
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.training import Training
from tests.unit.synthetic import MLP, cpu_hosts, training_graph
from tests.unit.test_calibration import CLUSTER, calibration
from tests.unit.test_runner_up import with_factors

SHORT = Budget(time_s=5.0, evaluations=1)
SMALL = MLP[:4]


def outcomes(found: Sensitivity) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in found.outcomes}


def used(outcome: Outcome) -> set[str]:
    """The strategies of the best other plan."""
    return {group.strategy for group in outcome.best_groups}


def of(name: str, cluster: ClusterSpec, graph: TrainingGraph) -> tuple[Plan, dict[str, Outcome]]:
    n = cluster.world_size
    plan = build_plan(name, graph, cluster, Context(n))
    return plan, outcomes(sensitivity(plan, graph, Context(n), budget=SHORT))


def step_s(name: str, cluster: ClusterSpec, graph: TrainingGraph) -> float:
    prediction = build_plan(name, graph, cluster, Context(cluster.world_size)).prediction
    assert prediction is not None
    return prediction.step_time_s


def test_factors_are_sent_where_the_network_is_slow_and_gradients_where_it_is_fast() -> None:
    """Factors are half of what is sent, and four times the product: at 2 Gbit/s the former matters more, at 4 the
    latter, as pricing both plans says."""
    graph = with_factors()
    slow, fast = cpu_hosts(4, "2 Gbit/s"), cpu_hosts(4, "4 Gbit/s")
    gradients, factors = "all_reduce_4MiB", "structured"
    assert step_s(factors, slow, graph) < 0.95 * step_s(gradients, slow, graph)
    assert step_s(gradients, fast, graph) < 0.95 * step_s(factors, fast, graph)

    plan, found = of(factors, slow, graph)
    assert plan.prediction is not None
    assert found["as it is"].step_time_s == plan.prediction.step_time_s
    assert "sufficient_factors" in used(found["as it is"]) and "sufficient_factors" in used(found["bandwidth x 1/2"])
    flipped = found["bandwidth x 2"]
    assert flipped.changes and flipped.step_time_s == step_s(factors, fast, graph)
    assert flipped.best_step_time_s is not None and flipped.best_step_time_s <= step_s(gradients, fast, graph)
    assert "sufficient_factors" not in used(flipped)
    assert "at twice the bandwidth" in flipped.text and "less time" in flipped.text

    plan = search(graph, fast, Context(4), budget=SHORT)
    found = outcomes(sensitivity(plan, graph, Context(4), budget=SHORT))
    assert found["bandwidth x 1/2"].changes and "sufficient_factors" in used(found["bandwidth x 1/2"])
    assert "holds: stays the best by" in found["as it is"].text


def test_the_lead_of_a_plan_that_holds_is_over_the_fastest_other_one_whoever_writes_it() -> None:
    graph, cluster, budget = training_graph(SMALL), cpu_hosts(4), Budget(time_s=60.0, evaluations=60)
    searched = search_result(graph, cluster, Context(4), budget=budget)
    own = executed(searched.plan.groups)
    fastest = min((c for c in searched.candidates if executed(c.groups) != own), key=lambda c: c.step_time_s)
    found = outcomes(sensitivity(searched.plan, graph, Context(4), budget=budget))["as it is"]
    assert not found.changes and found.best == fastest.name == SEARCHED
    assert found.best_step_time_s == fastest.step_time_s
    assert found.written_step_time_s is not None and found.written_step_time_s > fastest.step_time_s
    assert f"; of those that a person would write, {found.written} is next, by " in found.verdict


def test_batches_and_hosts_are_priced_as_such_plans_would_be() -> None:
    graph = training_graph(SMALL)
    _, found = of("zero1", cpu_hosts(4), graph)
    assert found["hosts x 2"].step_time_s == step_s("zero1", cpu_hosts(8), graph)
    assert found["hosts x 1/2"].step_time_s == step_s("zero1", cpu_hosts(2), graph)
    assert found["batch x 2"].step_time_s == step_s("zero1", cpu_hosts(4), scaled(graph, TWICE))
    assert "scaled" in found["batch x 2"].assumption and found["hosts x 2"].assumption == ""


def test_a_plan_with_owners_is_built_anew_for_another_number_of_ranks() -> None:
    graph = training_graph(SMALL)
    _, found = of("PSLoadBalancing", cpu_hosts(4), graph)
    for hosts, name in ((2, "hosts x 1/2"), (8, "hosts x 2")):
        assert found[name].step_time_s == step_s("PSLoadBalancing", cpu_hosts(hosts), graph)
    plan = build_plan("PSLoadBalancing", graph, cpu_hosts(4), Context(4)).model_copy(update={"name": "searched"})
    moved = outcomes(sensitivity(plan, graph, Context(4), budget=SHORT))
    assert all(moved[name].step_time_s is not None for name in ("hosts x 1/2", "hosts x 2"))


def test_what_cannot_be_priced_is_left_out_with_the_reason() -> None:
    graph = replace(training_graph(SMALL), batch_size=1)
    cluster = ClusterSpec.loads("hosts: [{name: a, devices: 4 x cpu}]")
    _, found = of("ddp", cluster, graph)
    assert "a batch of 1" in found["batch x 1/2"].left_out and not found["batch x 2"].left_out
    assert "cannot be multiplied by 1/2" in found["hosts x 1/2"].left_out
    assert "bandwidth" in found["hosts x 2"].left_out
    assert found["hosts x 2"].text.startswith("hosts x 2: not priced: ")
    assert why_not(replace(graph, eager=True), TWICE) and why_not(replace(graph, batch_size=None), TWICE)
    one = cpu_hosts(2)
    _, found = of("ddp", one, training_graph(SMALL))
    assert found["hosts x 1/2"].left_out == "one rank has nothing to synchronize"


def test_memory_changes_a_decision_too() -> None:
    """Replicas fit the device with this batch, and not with twice as large a one."""
    graph = training_graph(SMALL, live_bytes=20 << 20)
    peaks = [build_plan("ddp", g, cpu_hosts(4), Context(4)).prediction for g in (graph, scaled(graph, TWICE))]
    middle = sum(p.peak_memory_bytes for p in peaks if p is not None) // 2
    memory = round(middle / (1 - MEMORY_RESERVE))
    text = f"hosts: [{{name: a, count: 4, devices: {{kind: cpu, memory: {memory} B}}}}]\nnetwork: 1GbE"
    _, found = of("ddp", ClusterSpec.loads(text), graph)
    assert found["as it is"].usable and not found["batch x 2"].usable
    assert found["batch x 2"].changes and "more memory than it may take of a device" in found["batch x 2"].verdict


def test_as_much_memory_is_kept_free_as_when_the_plan_was_made() -> None:
    """A plan that takes all but a few per cent of the memory, as was asked for, fits as it is."""
    graph = training_graph(SMALL, live_bytes=20 << 20)
    ddp = build_plan("ddp", graph, cpu_hosts(4), Context(4)).prediction
    assert ddp is not None
    memory = round(1.03 * ddp.peak_memory_bytes)
    text = f"hosts: [{{name: a, count: 4, devices: {{kind: cpu, memory: {memory} B}}}}]\nnetwork: 1GbE"
    for reserve, fits in ((0.0, True), (0.1, False)):
        kept = Constraints(memory_reserve=reserve)
        plan = build_plan("ddp", graph, ClusterSpec.loads(text), Context(4), constraints=kept)
        assert outcomes(sensitivity(plan, graph, Context(4), budget=SHORT))["as it is"].usable is fits


def test_other_plans_keep_to_what_was_pinned_and_forbidden() -> None:
    """Pinned to one owner, the plan is far from the best there is; the owner is not there on two hosts."""
    graph, asked = training_graph(SMALL), Constraints.of(pin={"*": "parameter_server(owner=3)"})
    plan = search(graph, cpu_hosts(4), Context(4), budget=SHORT, constraints=asked)
    found = outcomes(sensitivity(plan, graph, Context(4), budget=SHORT))
    assert {s for outcome in found.values() for s in used(outcome)} == {"parameter_server"}
    assert not found["as it is"].changes and not found["hosts x 1/2"].left_out
    assert found["hosts x 1/2"].best_step_time_s is not None
    forbidding = Constraints.of(forbid=["parameter_server", "partitioned_parameter_server"])
    plan = search(graph, cpu_hosts(4), Context(4), budget=SHORT, constraints=forbidding)
    found = outcomes(sensitivity(plan, graph, Context(4), budget=SHORT))
    assert not {s for outcome in found.values() for s in used(outcome)} & forbidding.forbidden


def test_without_what_trials_taught_no_other_plan_is_said_to_be_better() -> None:
    graph, cluster = training_graph(SMALL), cpu_hosts(4)
    plan = build_plan("PS", graph, cluster, Context(4)).model_copy(update={"lessons": 1})
    model = cost_model_for(trials=lambda basis: [])
    for prices in (None, model):
        found = sensitivity(plan, graph, Context(4), budget=SHORT, cost_model=prices)
        assert found.is_untaught and found.changing == ()
        assert {o.verdict for o in found.outcomes if not o.left_out} == {UNTAUGHT}
        assert "--trials FILE" in what_if_text(plan, found)
    assert isinstance(model, CorrectedCostModel)
    taught = model.fit_lessons([Lesson(dict.fromkeys(model.correction.features, 0.0), 0.1, 0.2)])
    found = sensitivity(plan, graph, Context(4), budget=SHORT, cost_model=taught)
    assert not found.is_untaught and outcomes(found)["as it is"].changes
    assert "--trials FILE" not in what_if_text(plan, found)


def test_a_plan_for_another_model_is_refused() -> None:
    plan = build_plan("ddp", training_graph(), cpu_hosts(4), Context(4))
    with pytest.raises(PlanMismatchError):
        sensitivity(plan, training_graph([("other", (4, 4))]), Context(4))


DESCRIPTIONS = (
    "hosts: [{name: a, count: 2, devices: 2 x cpu}]\nnetwork: 25GbE",
    "hosts: [{name: a, count: 2, devices: 1 x cpu, bandwidth: {send: 1 Gbit/s, receive: 0.3 Gbit/s}}]\nnetwork: 10GbE",
    "hosts: [{name: a, count: 2, devices: 1 x cpu, switch: x}, {name: b, devices: 1 x cpu, switch: y}]\n"
    "network: {bandwidth: 1 Gbit/s, switches: [{name: x, bandwidth: 2 Gbit/s}, y], links: [{between: [x, y]}]}",
    "hosts: [{name: a, devices: 1 x cpu}, {name: b, devices: 1 x cpu}]\n"
    "network: {links: [{between: [a, b], bandwidth: 3 Gbit/s}]}",
)


@pytest.mark.parametrize("text", DESCRIPTIONS)
@pytest.mark.parametrize("factor", [HALF, TWICE])
def test_every_cable_has_another_rate_and_nothing_else(text: str, factor: Fraction) -> None:
    before = ClusterSpec.loads(text)
    after = with_bandwidth(before, factor)
    for one, other in zip(before.cables, after.cables, strict=True):
        assert float(other.forth_bytes_per_s) == pytest.approx(float(factor) * float(one.forth_bytes_per_s), rel=1e-12)
        assert float(other.back_bytes_per_s) == pytest.approx(float(factor) * float(one.back_bytes_per_s), rel=1e-12)
        assert (other.one, other.other, other.latency_s) == (one.one, one.other, one.latency_s)
    assert [h.devices for h in after.all_hosts] == [h.devices for h in before.all_hosts]
    assert [h.interconnect for h in after.all_hosts] == [h.interconnect for h in before.all_hosts]


def test_on_one_host_the_interconnect_has_another_rate() -> None:
    before = ClusterSpec.loads("hosts: [{name: a, devices: 4 x A100-80GB}]")
    one, other = before.all_hosts[0].interconnect, with_bandwidth(before, HALF).all_hosts[0].interconnect
    assert float(other.bytes_per_s) == float(one.bytes_per_s) / 2 and other.latency_s == one.latency_s


def test_hosts_that_only_serve_stay_as_many() -> None:
    before = ClusterSpec.loads("hosts: [{name: a, count: 2, devices: 1 x cpu}, {name: s, serves: true}]\nnetwork: 1GbE")
    assert len(with_hosts(before, TWICE).all_hosts) == 5
    with pytest.raises(ClusterSpecError, match="3 hosts 'host' cannot be multiplied by 1/2"):
        with_hosts(cpu_hosts(3), HALF)
    with pytest.raises(ClusterSpecError, match="allows no such cluster"):
        with_hosts(ClusterSpec.loads(DESCRIPTIONS[3]), TWICE)


@pytest.mark.parametrize("change", ["bandwidth", "hosts"])
def test_what_was_measured_keeps_its_multiple_of_what_the_figures_say(change: str) -> None:
    links = (LinkTimes(sender=0, receiver=1, bytes_per_s=1e8, latency_s=1e-5),)
    known = calibration(1.5).model_copy(update={"links": links})
    there = with_bandwidth(CLUSTER, HALF) if change == "bandwidth" else with_hosts(CLUSTER, TWICE)
    carried = carried_calibration(known, CLUSTER, there)
    carried.check_cluster(there.fingerprint)
    plain, corrected = Network(Topology(there)), Network(Topology(there), calibration=carried)
    for size in known.collectives[0].size_bytes:
        call = measured(known.collectives[0], size, there.world_size)
        assert corrected.transfer(call).seconds == pytest.approx(1.5 * plain.transfer(call).seconds, rel=1e-6)
    assert carried.links[0].bytes_per_s == pytest.approx(5e7 if change == "bandwidth" else 1e8)


def test_measured_times_of_nodes_grow_with_the_batch() -> None:
    model = AnalyticCostModel(measured_s={"cpu": {"n0": 0.5}}, calibration=calibration())
    there = carried_model(model, CLUSTER, CLUSTER, 2.0)
    assert isinstance(there, AnalyticCostModel)
    assert there.measured_s == {"cpu": {"n0": 1.0}} and there.calibration == model.calibration


class Text(nn.Module):
    """A table of words, one of places, which is the same for all samples, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(6, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        scores: torch.Tensor = self.head(self.layer(x)).flatten(0, 1)
        return scores


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.norm(self.first(x)).relu().flatten(1))
        return scores


class Pairs(nn.Module):
    """Compares each sample with each other."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.layer(x))


def captured(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> TrainingGraph:
    settings = Settings(loss_fn=nn.functional.cross_entropy)
    training = Training(model, (x, target), settings, torch.optim.AdamW(model.parameters()), "step")
    return training.graph()


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_a_scaled_graph_is_nearly_that_of_the_larger_batch(kind: str) -> None:
    def graph(n: int) -> TrainingGraph:
        if kind == "text":
            return captured(Text(), torch.arange(6 * n).reshape(n, 6) % 50, torch.zeros(6 * n, dtype=torch.long))
        return captured(Pictures(), torch.ones(n, 3, 8, 8), torch.zeros(n, dtype=torch.long))

    small, large = graph(4), graph(8)
    assert why_not(small, TWICE) is None
    found = scaled(small, TWICE)
    assert [n.flops for n in found.compute] == [n.flops for n in large.compute]
    for field in ("bytes_moved", "own_bytes", "live_bytes"):
        ours, theirs = (sum(getattr(n, field) for n in g.compute) for g in (found, large))
        assert ours == pytest.approx(theirs, rel=0.005), field
    for one, other in zip(found.parameters, large.parameters, strict=True):
        assert (one.parts, one.head, one.layer, one.table) == (other.parts, other.head, other.layer, other.table)
    assert (found.input_bytes, found.batch_size) == (large.input_bytes, large.batch_size)


COMPARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "products": lambda z: z @ z.T,
    "distances": lambda z: -torch.cdist(z, z),
    "differences": lambda z: -(z[:, None] - z[None]).square().sum(-1),
    "products of heads": lambda z: torch.einsum("ihd,jhd->ij", z.reshape(-1, 2, 2), z.reshape(-1, 2, 2)),
}


@pytest.mark.parametrize("how", COMPARED)
def test_a_model_that_compares_samples_is_not_scaled(how: str) -> None:
    graph = captured(Pairs(COMPARED[how]), torch.rand(6, 8), torch.arange(6))
    assert "compared with each other" in str(why_not(graph, TWICE))
