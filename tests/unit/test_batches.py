"""Ranks whose batches have other sizes than the example: priced by their own."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models import AnalyticCostModel
from autopar.cost_models.analytic import StepPricer
from autopar.errors import ClusterSpecError, InfeasibleError, SpecError
from autopar.search import Budget, Problem, SearchOptions, search
from autopar.search.builders import builder_named
from autopar.search.circumstances import with_batches
from autopar.search.nearest import _peaks
from autopar.spec.calibration import DeviceRates
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph

KIND = {"cpu": {"n0": 1e-3}}


def cluster(first: str, second: str) -> ClusterSpec:
    hosts = f"[{{name: a, devices: {{kind: cpu{first}}}}}, {{name: b, devices: {{kind: cpu{second}}}}}]"
    return ClusterSpec.loads(f"{{hosts: {hosts}, network: {{bandwidth: 1 Gbit/s}}}}")


def pricer(spec: ClusterSpec, measured: bool = False) -> StepPricer:
    graph = training_graph(live_bytes=10**6, flops=10**9)
    return StepPricer(graph, Topology(spec), measured_s=KIND if measured else None)


def test_a_rank_computes_as_long_as_its_own_batch_takes() -> None:
    same = pricer(cluster("", "")).graph_s(frozenset())
    few, many = pricer(cluster(", batch: 4", ", batch: 16")).graph_s(frozenset())
    assert same[0] == same[1]
    assert few == pytest.approx(same[0] / 2, rel=0.05) and many == pytest.approx(2 * same[0], rel=0.05)
    # The example's size says nothing new.
    assert pricer(cluster(", batch: 8", "")).graph_s(frozenset()).tolist() == same.tolist()


def test_measured_times_grow_as_those_on_the_roofline() -> None:
    _, many = pricer(cluster(", batch: 8", ", batch: 16"), measured=True).graph_s(frozenset())
    once, _ = pricer(cluster("", ""), measured=True).graph_s(frozenset())
    assert many == pytest.approx(2 * once, rel=0.05)


def test_a_rank_holds_what_its_own_batch_takes() -> None:
    def peaks(spec: ClusterSpec) -> tuple[int, ...]:
        one = pricer(spec)
        return one.estimate(lower_plan((), one.graph, Context(2))).peak_memory_bytes

    (few, many), (same, _) = peaks(cluster("", ", batch: 16")), peaks(cluster("", ""))
    assert few == same and many == same + 10**6


def test_a_changed_graph_is_priced_with_the_batch_of_each_device() -> None:
    """And with what the backend adds up by itself."""
    hosts = "[{name: a, devices: {kind: A100-80GB}}, {name: b, devices: {kind: A100-80GB, batch: 16}}]"
    spec = ClusterSpec.loads(f"{{hosts: {hosts}, network: {{bandwidth: 25 Gbit/s}}}}")
    graph, context = training_graph(live_bytes=10**6), Context(2).on(spec)
    of = Problem(graph, spec, Topology(spec), context, AnalyticCostModel())
    groups = builder_named("zero1")(graph.parameters, context, spec)
    estimate = of.cost_model.predict(graph, lower_plan(groups, graph, context), of.topology)
    assert _peaks(of, groups, replace) == estimate.peak_memory_bytes


def test_fewer_samples_are_advised_of_the_batch_that_does_not_fit() -> None:
    graph, spec = training_graph(live_bytes=25 << 20), cluster(", memory: 1 GiB", ", memory: 200 MiB, batch: 64")
    advised = r"fits: (32|16|8) samples on each cpu in place of 64, and fewer in proportion on the others \(about "
    with pytest.raises(InfeasibleError, match=advised):
        search(graph, spec, Context(2), budget=Budget(evaluations=1))


def test_trials_are_refused_where_devices_have_other_batches_than_the_example() -> None:
    def planned(spec: ClusterSpec) -> autopar.Plan:
        how = SearchOptions(finalists=lambda found: found.plan, evaluations=1)
        return autopar.plan(nn.Linear(4, 4), spec, example_inputs=torch.randn(8, 4), mode="module", search=how)

    assert planned(cluster(", batch: 8", "")).groups
    with pytest.raises(SpecError, match=r"samples: 8\) on every rank, .* have others \(as in .*leave `batch` out"):
        planned(cluster("", ", batch: 16"))


def test_plans_say_the_batches_and_run_with_any() -> None:
    mixed, plain = cluster(", batch: 4", ", batch: 16"), cluster("", "")
    plan = autopar.plan(nn.Linear(4, 4), mixed, example_inputs=torch.randn(8, 4), mode="module", strategy="ddp")
    assert "batches   4 on 1 cpu, 16 on 1 cpu (samples in each rank's batch)" in plan.explain()
    assert mixed.fingerprint.digest == plain.fingerprint.digest and not mixed.difference(plain)
    assert plan.cluster.cluster.batches == mixed.batches and not plain.batches


def test_other_circumstances_have_as_many_times_the_batch_on_each() -> None:
    assert with_batches(cluster("", ", batch: 6"), Fraction(1, 2)).batches == "as in the example on 1 cpu, 3 on 1 cpu"
    with pytest.raises(ClusterSpecError, match="a batch of 3 on cpu cannot be multiplied by 1/2"):
        with_batches(cluster("", ", batch: 3"), Fraction(1, 2))


def test_what_cannot_be_scaled_is_said() -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum().item() > 0 else 2 * x)

    with pytest.warns(autopar.AutoparWarning) as said:
        autopar.plan(
            Branches(4, 4), cluster("", ", batch: 6"), example_inputs=torch.randn(8, 4), mode="module", strategy="ddp"
        )
    assert any("priced with the example's on each rank: the model runs eagerly" in str(w.message) for w in said)


@pytest.mark.parametrize("batch", ["0", "-1", "many", "1.5"])
def test_a_batch_is_a_whole_number(batch: str) -> None:
    with pytest.raises(ClusterSpecError, match="is not possible; expected a whole number from 1"):
        cluster("", f", batch: {batch}")


def test_what_was_measured_of_a_device_is_longer_on_slower_ones_of_its_kind() -> None:
    spec = ClusterSpec.loads(
        "{hosts: [{name: fast, devices: {kind: cpu, peak_flops: 60 GFLOP/s}}, "
        "{name: slow, devices: {kind: cpu, peak_flops: 20 GFLOP/s}}], network: {bandwidth: 1 Gbit/s}}"
    )
    graph = training_graph()
    given: dict[str, Any]
    measured = {"cpu": {node.name: 0.002 for node in graph.compute}}
    rates = DeviceRates(
        kind="cpu", flops_per_s={"float32": 4e10}, bytes_per_s=1e10, update_bytes_per_s=1e10, start_s=1e-6
    )
    for given in ({"measured_s": measured}, {"device_rates": [rates]}):
        fast_s, slow_s = StepPricer(graph, Topology(spec), **given).graph_s(frozenset())
        assert slow_s == pytest.approx(3 * fast_s, rel=0.01)
    one, other = StepPricer(graph, Topology(cpu_hosts(2)), measured_s=measured).graph_s(frozenset())
    assert one == other == pytest.approx(0.002 * len(graph.compute))
