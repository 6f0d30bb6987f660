"""The analytic cost model as a whole: what it says of plans, and of one plan against another."""

from __future__ import annotations

import pytest

from autopar.cost_models import AnalyticCostModel, Estimate
from autopar.ir.training_graph import TrainingGraph
from autopar.search.builders import builder_named
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph

MIB = 1 << 20


def estimate(
    name: str,
    cluster: ClusterSpec,
    graph: TrainingGraph | None = None,
    *,
    clips: bool = False,
    timeline: bool = False,
    model: AnalyticCostModel | None = None,
) -> Estimate:
    graph = graph or training_graph()
    context = Context(cluster.world_size, clips=clips)
    groups = builder_named(name)(graph.parameters, context, cluster)
    program = lower_plan(groups, graph, context)
    return (model or AnalyticCostModel()).predict(graph, program, Topology(cluster), timeline=timeline)


def test_with_one_rank_there_is_compute_and_nothing_else() -> None:
    alone = estimate("ddp", cpu_hosts(1))
    assert alone.step_time_s == alone.compute_s > 0
    assert alone.exposed_communication_s == alone.communication_s == 0
    assert alone.sent_bytes == alone.received_bytes == (0,)


def test_a_step_without_compute_takes_its_bytes_over_the_bandwidth() -> None:
    """Twelve parameters, 24 MiB, one bucket, hardly any compute: 1.5 times 24 MiB through a card of 1 Gbit/s."""
    idle = training_graph(flops=1, bytes_moved=1)
    step = estimate("all_reduce_one_bucket", cpu_hosts(4), idle)
    wire_s = 1.5 * sum(p.numel * 4 for p in idle.parameters) / 125e6
    assert step.communication_s == pytest.approx(wire_s, rel=0.07)
    assert step.exposed_communication_s == pytest.approx(wire_s, rel=0.07)


def test_overlap_is_complete_where_compute_dominates() -> None:
    """With 20 s of compute, only the last bucket and the small sums of a step are left to wait for."""
    busy = training_graph(flops=10**11)
    step = estimate("all_reduce_1MiB", cpu_hosts(4), busy)
    last = 1.5 * 4 * 1024 * 1025 / (0.955 * 125e6)
    assert step.communication_s > 0.3
    assert step.exposed_communication_s < 1.1 * last + 0.01 * step.compute_s


def test_smaller_buckets_hide_more() -> None:
    graph = training_graph(flops=10**10)
    many, one = (estimate(n, cpu_hosts(4), graph) for n in ("all_reduce_4MiB", "all_reduce_one_bucket"))
    assert many.exposed_communication_s < 0.5 * one.exposed_communication_s
    assert many.sent_bytes == pytest.approx(one.sent_bytes, rel=1e-6)


@pytest.mark.parametrize("name", ["ddp", "zero1", "PS", "PSLoadBalancing", "Parallax"])
def test_a_step_is_never_slower_on_a_faster_network(name: str) -> None:
    times = [estimate(name, cpu_hosts(4, f"{rate} Gbit/s")).step_time_s for rate in (0.1, 0.3, 1, 3, 10)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 3 * times[-1]


def test_one_owner_is_slower_than_the_ring() -> None:
    """The sum takes as long as an all-reduce; beside the sums of the next, all parameters leave the owner twice, and a
    second rank once."""
    ring, owner = estimate("ddp", cpu_hosts(4)), estimate("PS", cpu_hosts(4))
    assert 2 * ring.communication_s < owner.communication_s < 4 * ring.communication_s
    assert owner.step_time_s > 1.5 * ring.step_time_s
    assert max(owner.sent_bytes) == pytest.approx((0.75 + 2) / 1.5 * max(ring.sent_bytes), rel=0.01)


def test_half_the_bytes_take_half_the_time() -> None:
    idle = training_graph(flops=1, bytes_moved=1)
    wide, narrow = (estimate(n, cpu_hosts(4), idle) for n in ("ddp", "ddp+bf16"))
    assert narrow.communication_s == pytest.approx(wide.communication_s / 2, rel=0.05)
    assert max(narrow.sent_bytes) == pytest.approx(max(wide.sent_bytes) / 2, rel=0.01)


def test_shards_take_a_quarter_of_the_update() -> None:
    ring, shards = estimate("ddp", cpu_hosts(4)), estimate("zero1", cpu_hosts(4))
    assert shards.compute_s < ring.compute_s
    assert max(shards.peak_memory_bytes) < max(ring.peak_memory_bytes)


def test_the_slower_device_decides() -> None:
    mixed = ClusterSpec.loads(
        "hosts: [{name: a, devices: 1 x cpu}, {name: b, devices: {kind: cpu, peak_flops: 80 GFLOP/s}}]\n"
        "network: {bandwidth: 10 Gbit/s}"
    )
    graph = training_graph(flops=10**10)
    ratio = estimate("ddp", mixed, graph).step_time_s / estimate("ddp", cpu_hosts(2, "10 Gbit/s"), graph).step_time_s
    assert ratio == pytest.approx(4, rel=0.1)


def test_clipping_waits_for_every_gradient() -> None:
    plain, clipped = (estimate("zero1", cpu_hosts(4), clips=c, timeline=True) for c in (False, True))
    assert clipped.step_time_s > plain.step_time_s
    updates = [s.start_s for s in clipped.spans if s.name.startswith("update")]
    sums = [s.stop_s for s in clipped.spans if s.name.startswith("reduce_scatter")]
    assert min(updates) >= max(sums)


def test_the_timeline_is_drawn_only_when_asked_for_and_changes_nothing() -> None:
    bare, drawn = (estimate("ddp", cpu_hosts(4), timeline=t) for t in (False, True))
    assert bare.spans == ()
    assert {s.lane for s in drawn.spans} == {"rank 0", "gloo"}
    assert drawn.step_time_s == pytest.approx(bare.step_time_s)
    assert {"forward", "backward"} <= {s.name for s in drawn.spans}


def test_equal_input_gives_equal_output() -> None:
    model = AnalyticCostModel()
    first = estimate("Parallax", cpu_hosts(4), model=model)
    estimate("ddp", cpu_hosts(3), model=model)
    assert estimate("Parallax", cpu_hosts(4), model=model) == first
    assert model.fit([]) is model


def test_a_plan_records_the_rank_that_sends_and_needs_most() -> None:
    step = estimate("PS", cpu_hosts(4))
    prediction = step.prediction()
    assert prediction.wire_bytes == max(step.sent_bytes) > min(step.sent_bytes)
    assert prediction.peak_memory_bytes == max(step.peak_memory_bytes) > min(step.peak_memory_bytes)
    assert prediction.step_time_s == pytest.approx(prediction.compute_s + prediction.exposed_communication_s)
