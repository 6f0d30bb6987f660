"""A global batch that is shared out, so that ranks on unequal devices compute equally long."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models.analytic import AnalyticCostModel, StepPricer
from autopar.errors import InfeasibleError, SpecError
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime import timing
from autopar.runtime.operator_times import VARIABLE
from autopar.runtime.profile import node_seconds
from autopar.search import SearchOptions, with_shares
from autopar.search.batch_shares import Entry, _shared
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from autopar.spec.topology import Topology
from autopar.strategies import Context
from tests.unit.synthetic import training_graph

SLOW = "{kind: cpu, peak_flops: 20 GFLOP/s, memory: 4 GiB%s}"
FAST = "{kind: cpu, peak_flops: 60 GFLOP/s, memory: 4 GiB%s}"


def cluster(*devices: str) -> ClusterSpec:
    """A host with each of these devices."""
    hosts = ", ".join(f"{{name: host{i}, devices: {d}}}" for i, d in enumerate(devices))
    return ClusterSpec.loads(f"{{hosts: [{hosts}], network: {{bandwidth: 1 Gbit/s}}}}")


def graph() -> TrainingGraph:
    return training_graph(live_bytes=10**6, flops=10**9)


def shares(spec: ClusterSpec, samples: int, of: TrainingGraph | None = None) -> list[int | None]:
    found = with_shares(samples, of or graph(), spec, Context(spec.world_size), AnalyticCostModel())
    return [place.device.batch for place in found.ranks]


def test_a_rank_on_a_device_three_times_as_fast_has_three_times_the_samples() -> None:
    spec = cluster(FAST % "", SLOW % "")
    assert shares(spec, 64) == [48, 16]
    found = with_shares(64, graph(), spec, Context(2), AnalyticCostModel())
    fast, slow = StepPricer(graph(), Topology(found)).graph_s(frozenset())
    assert fast == pytest.approx(slow, rel=0.05)


def test_equal_devices_have_equal_batches_where_that_comes_out_even() -> None:
    assert shares(cluster(SLOW % "", SLOW % "", SLOW % ""), 12) == [4, 4, 4]
    assert sorted(shares(cluster(SLOW % "", SLOW % "", SLOW % ""), 13)) == [4, 4, 5]  # type: ignore[type-var]


def test_what_the_description_says_stays() -> None:
    assert shares(cluster(FAST % "", SLOW % ", batch: 10", SLOW % ""), 42) == [24, 10, 8]


def test_each_host_of_an_entry_has_as_many() -> None:
    hosts = f"[{{name: a, count: 2, devices: [{FAST % ''}, {SLOW % ''}]}}, {{name: b, devices: {SLOW % ''}}}]"
    spec = ClusterSpec.loads(f"{{hosts: {hosts}, network: {{bandwidth: 1 Gbit/s}}}}")
    assert shares(spec, 90) == [30, 10, 30, 10, 10]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_whole_numbers_end_sooner(seed: int) -> None:
    numbers = random.Random(seed)
    entries = [
        Entry(i, 0, numbers.randint(1, 3), "cpu", numbers.random(), numbers.uniform(0.1, 2.0), numbers.randint(3, 9))
        for i in range(3)
    ]
    for rest in range(sum(e.ranks for e in entries), sum(e.ranks * e.most for e in entries) + 1):
        ways = [
            way
            for way in itertools.product(*(range(1, e.most + 1) for e in entries))
            if sum(e.ranks * n for e, n in zip(entries, way, strict=True)) == rest
        ]
        found = _shared(entries, rest)
        assert (found is None) == (not ways)
        if found is not None:
            longest = [max(e.seconds(n) for e, n in zip(entries, way, strict=True)) for way in (*ways, found)]
            assert longest[-1] == min(longest)


def test_memory_bounds_a_rank() -> None:
    small = "{kind: cpu, peak_flops: 60 GFLOP/s, memory: 100 MB}"
    most, other = shares(cluster(small, SLOW % ""), 400, training_graph(live_bytes=2 * 10**6, flops=10**9))
    assert most is not None and other is not None and most < other and most + other == 400


def test_samples_that_fit_without_a_replica_on_each_rank_are_shared_out() -> None:
    """With DDP's replicas, a rank has memory for 10 samples; where state is spread over the ranks, for more."""
    one = "{kind: cpu, peak_flops: 60 GFLOP/s, memory: %d MiB, count: 2}"
    layers = [(f"{i}.weight", (1024, 512)) for i in range(8)]
    of = training_graph(layers, live_bytes=8 << 20, flops=10**9)
    assert shares(cluster(one % 80, SLOW % ", count: 2, batch: 8"), 76, of) == [30, 30, 8, 8]


def test_samples_that_fit_with_no_known_plan_are_left_to_the_search() -> None:
    """A search computes activations again; where even that does not help, no plan is what fails, not the request."""
    wide = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    small = "{kind: cpu, peak_flops: %d GFLOP/s, memory: 4 MiB}"
    batch = (torch.randn(8, 64), torch.randn(8, 64))

    def planned(samples: int) -> Plan:
        return autopar.plan(
            wide,
            cluster(small % 60, small % 20),
            example_inputs=batch,
            loss_fn=nn.functional.mse_loss,
            time_budget_s=1.0,
            search=SearchOptions(global_batch=samples),
        )

    assert planned(2800).recompute != "none"
    with pytest.raises(InfeasibleError, match="no plan fits"):
        planned(10**8)


@pytest.mark.parametrize(
    ("devices", "samples", "said"),
    [
        ((FAST % "", SLOW % ""), 1, "leaves 1 samples for 2 ranks"),
        ((FAST % ", batch: 4", SLOW % ""), 4, "leaves 0 samples for 1 rank"),
        ((FAST % ", batch: 4", SLOW % ", batch: 4"), 8, "every device of the cluster has a batch"),
        ((FAST % ", count: 2", SLOW % ", count: 2"), 33, "take 32 or 34, or give them an entry each"),
    ],
)
def test_what_cannot_be_shared_out_is_said(devices: tuple[str, ...], samples: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        shares(cluster(*devices), samples)


def test_plans_are_made_for_the_shares() -> None:
    model, batch = nn.Linear(64, 64), (torch.randn(8, 64), torch.randn(8, 64))
    spec = cluster(FAST % "", SLOW % "")
    for strategy in (None, "ddp"):
        plan = autopar.plan(
            model,
            spec,
            example_inputs=batch,
            loss_fn=nn.functional.mse_loss,
            strategy=strategy,
            time_budget_s=1.0,
            search=SearchOptions(global_batch=4096),
        )
        fast, slow = (place.device.batch or 0 for place in plan.cluster.cluster.ranks)
        assert fast > slow > 0 and fast + slow == 4096
        assert f"batches   {fast} on 1 cpu, {slow} on 1 cpu" in plan.explain()


def test_what_is_timed_is_timed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    timed: list[TrainingGraph] = []

    def counted(graph: TrainingGraph, *args: Any, **kwargs: Any) -> dict[str, float]:
        timed.append(graph)
        return node_seconds(graph, *args, **kwargs)

    monkeypatch.setattr(timing, "node_seconds", counted)
    autopar.plan(
        nn.Linear(64, 64),
        cluster(FAST % "", SLOW % ""),
        example_inputs=(torch.randn(8, 64), torch.randn(8, 64)),
        loss_fn=nn.functional.mse_loss,
        measure_compute=True,
        time_budget_s=1.0,
        search=SearchOptions(global_batch=4096),
    )
    assert len(timed) == 1


def test_an_eager_models_batch_is_not_shared_out() -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum().item() > 0 else 2 * x)

    with pytest.raises(SpecError, match="the model runs eagerly"), pytest.warns(autopar.AutoparWarning):
        autopar.plan(
            Branches(4, 4),
            cluster(FAST % "", SLOW % ""),
            example_inputs=torch.randn(8, 4),
            mode="module",
            search=SearchOptions(global_batch=32),
        )
