"""The pool: trials on living ranks, what they measure, and that it outlives trials that crash, hang or disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

import pytest

from autopar import ClusterSpec, Plan
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.lab import Lab, unavailable_reason
from autopar.lab.pool import Limits, Pool
from autopar.lab.trial import RealCompute, TrialResult, TrialSpec, VirtualCompute
from autopar.ops.collectives import wire_bytes
from autopar.search import build_plan
from autopar.spec.plan import ModelFingerprint
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.lab.pool_workloads import workload

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

RANKS = 2
CLUSTER = ClusterSpec.loads("{hosts: [{name: host, count: 2, devices: 1 x cpu}], network: {bandwidth: 1 Gbit/s}}")
CONTEXT = Context(RANKS, late_parameters=True).on(CLUSTER)
STEPS = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Lab.of(CLUSTER) as lab, Pool(lab, Limits(run_s=8.0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    good = workload()
    return training_graph(good.model(), flatten(good.batch(0, 0)), good.loss_fn)


def _plan(graph: TrainingGraph, name: str = "ddp") -> Plan:
    return build_plan(name, graph, CLUSTER, CONTEXT)


def _trial(pool: Pool, graph: TrainingGraph, how: str = "well", name: str = "ddp") -> TrialResult:
    real = RealCompute("tests.lab.pool_workloads:workload", (how,))
    return pool.trial(TrialSpec(_plan(graph, name), real, steps=STEPS))


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero1+late"])
def test_real_and_virtual_compute_send_the_declared_bytes(pool: Pool, graph: TrainingGraph, name: str) -> None:
    real = _trial(pool, graph, name=name)
    virtual = pool.trial(TrialSpec(_plan(graph, name), VirtualCompute(graph), steps=STEPS))
    program = lower_plan(_plan(graph, name).groups, graph, CONTEXT)
    declared = [sum(wire_bytes(c, RANKS)[0][r] for c in program.calls) for r in range(RANKS)]
    for result in (real, virtual):
        assert result.status == "ok", result.error
        assert result.order_hash == program.order_hash
        assert len(result.step_s) == STEPS and min(result.step_s) > 0
        assert len(result.losses) == STEPS + 1
        assert result.sent_bytes == pytest.approx(declared, rel=0.03)
        assert result.received_bytes == pytest.approx(declared, rel=0.03)
        assert result.step_time_s == median(result.step_s)
    assert all(math.isfinite(loss) for loss in real.losses) and real.losses[-1] != real.losses[0]
    assert min(real.peak_memory_bytes) > graph.parameter_bytes
    assert virtual.peak_memory_bytes == ()


def test_ranks_live_on_from_trial_to_trial_and_begin_from_the_same_weights(pool: Pool, graph: TrainingGraph) -> None:
    first = _trial(pool, graph)
    starts = pool.starts
    again = _trial(pool, graph)
    assert pool.starts == starts
    assert first.losses == again.losses


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("dies", "crashed", "rank 1"),
        ("raises", "crashed", "the data ran out"),
        ("hangs", "hung", "were not done after 8 s"),
    ],
)
def test_the_pool_outlives_a_trial_that_fails(
    pool: Pool, graph: TrainingGraph, how: str, status: str, said: str
) -> None:
    failed = _trial(pool, graph, how)
    starts = pool.starts
    assert failed.status == status and said in failed.error, failed
    assert failed.step_s == ()
    with pytest.raises(ValueError, match=status):
        _ = failed.step_time_s
    assert _trial(pool, graph).status == "ok"
    assert pool.starts == starts + 1


def test_ranks_that_disagree_do_not_begin(pool: Pool, graph: TrainingGraph) -> None:
    assert _trial(pool, graph).status == "ok"
    starts = pool.starts
    differing = _trial(pool, graph, "differs")
    assert differing.status == "disagreed"
    assert "rank 1: PlanMismatchError" in differing.error
    assert _trial(pool, graph).status == "ok"
    assert pool.starts == starts


def test_a_plan_that_cannot_be_used_is_refused(pool: Pool, graph: TrainingGraph) -> None:
    assert _trial(pool, graph).status == "ok"
    starts = pool.starts
    table = tuple(p.model_copy(update={"shape": (3, *p.shape[1:])}) for p in graph.model.parameters)
    other = _plan(graph).model_copy(update={"model": ModelFingerprint(name="Other", parameters=table)})
    refused = pool.trial(TrialSpec(other, VirtualCompute(graph), steps=STEPS))
    assert refused.status == "refused" and "another model" in refused.error
    assert _trial(pool, graph).status == "ok"
    assert pool.starts == starts


def test_a_budget_shortens_a_trial(pool: Pool, graph: TrainingGraph) -> None:
    compute = VirtualCompute(graph)
    result = pool.trial(TrialSpec(_plan(graph), compute, steps=50, budget_s=0.0, least_steps=2))
    assert len(result.step_s) == 2


def test_measured_times_take_the_place_of_modelled_ones(pool: Pool, graph: TrainingGraph) -> None:
    kind = CLUSTER.ranks[0].device.kind
    measured = {kind: {node.name: 0.3 / len(graph.compute) for node in graph.compute}}
    result = pool.trial(TrialSpec(_plan(graph), VirtualCompute(graph, measured_s=measured), steps=STEPS))
    assert result.status == "ok" and min(result.step_s) >= 0.29


def test_two_trials_are_compared_in_turn(pool: Pool, graph: TrainingGraph) -> None:
    plan = _plan(graph)
    fast = TrialSpec(plan, VirtualCompute(graph), steps=2)
    compute_s = plan.prediction.compute_s if plan.prediction else 0.0
    slow = TrialSpec(plan, VirtualCompute(graph, dilation=1.0 / compute_s), steps=1)  # a second a step
    found = pool.compare(fast, slow, rounds=3)
    assert len(found.ratios) == 3 and found.ratio == median(found.ratios)
    assert found.spread[0] <= found.ratio <= found.spread[1]
    assert len(found.a.step_s) == 6 and len(found.b.step_s) == 3
    assert min(found.b.step_s) >= 0.5
    assert found.ratio > 1
    raced = pool.in_turn({"fast": fast, "slow": slow, "like it": fast}, rounds=3, behind=2.0)
    assert [len(raced[name].block_s) for name in ("fast", "slow", "like it")] == [3, 1, 3]
