"""Ranks whose batches have other sizes than the example: priced by their own."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models.analytic import StepPricer
from autopar.errors import ClusterSpecError
from autopar.search.circumstances import with_batches
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import training_graph

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
