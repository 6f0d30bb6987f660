"""Parameters in shares of rows: when they are gathered and given back, what is sent, and when a plan has them."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost_models import optimizer_cost
from autopar.cost_models.memory import MemoryModel
from autopar.errors import PlanError
from autopar.ops.collectives import wire_bytes
from autopar.ops.exchanges import AllGather, ReduceScatter
from autopar.ops.shards import WholeParameters
from autopar.search import build_plan, search
from autopar.search.base import Budget
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph

MLP = [(f"{i}.weight", (1024, 1024)) for i in range(8)]
"""32 MiB, a node each in the forward pass, two in the backward pass."""


def _lowered(names: list[list[str]], options: dict[str, Any] | None = None, **context: Any) -> StepProgram:
    groups = [
        SyncGroup(
            strategy="sharded_parameters",
            members=tuple(ParameterSlice(name=n) for n in some),
            options=options or {},
        )
        for some in names
    ]
    return lower_plan(groups, training_graph(MLP), Context(4, **context))


def _placed(program: StepProgram, group: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for p in program.placed:
        if p.call.group is not None and p.call.group.index == group:
            op = p.call.op
            which = (".backward" if op.backward else ".forward") if isinstance(op, WholeParameters) else ""
            found.setdefault(op.name + which, []).append(p.position)
    return found


EACH = [[name] for name, _ in reversed(MLP)]
"""A group each, in the order of gradients."""


def test_a_group_is_whole_while_a_pass_reads_it() -> None:
    program = _lowered(EACH)
    graph = training_graph(MLP)
    for index, (name,) in enumerate(EACH[1:], 1):
        p, placed = graph.by_name[name], _placed(program, index)
        assert placed["shards.whole.forward"] == [p.first_use - 1]
        assert placed["shards.whole.backward"] == [p.first_backward - 1]
        assert placed["free"] == [p.last_forward, p.last_use]
        assert placed["shards.pack"] == [p.ready] == placed["reduce_scatter"]
        assert placed["update"] == placed["shards.gradient"]
        assert placed["update"][0] == min(max(p.ready + 1, p.last_use), len(graph.compute) - 1)
        for which, begun in zip(("forward", "backward"), placed["all_gather"], strict=True):
            assert begun < placed[f"shards.whole.{which}"][0] or begun == -1


def test_a_group_is_freed_as_it_is_read() -> None:
    """By two weights of eight at a time, each behind its last reader, while gradients take their place."""
    group = [name for (name,) in EACH]
    program = _lowered([group], {"keep": True})
    freed = [(p.position, p.call.elements) for p in program.placed if p.call.op.freed_elements()]
    by_name = training_graph(MLP).by_name
    assert freed == [(by_name[name].last_use, 2 << 20) for name in group[1::2]]
    graph = training_graph(MLP, live_bytes=10**9)
    peaks = MemoryModel(graph).peaks(program, optimizer_cost("SGD"))
    # Its share, a quarter; then all that was gathered and one gradient, never all of both.
    assert {round((peak - 10**9) / (4 << 20), 3) for peak in peaks} == {2 + 8 + 1}


def test_what_the_backward_pass_reads_at_once_is_kept() -> None:
    """The last layer's parameters; and all, where that is asked for."""
    assert "shards.whole.backward" not in _placed(_lowered(EACH), 0)
    kept = _lowered(EACH, {"keep": True})
    assert all("shards.whole.backward" not in _placed(kept, i) for i in range(len(EACH)))


def test_what_is_gathered_twice_takes_three_halves_of_an_all_reduce() -> None:
    def sent(program: StepProgram, group: int) -> float:
        return sum(wire_bytes(c, 4)[0][0] for c in program.calls if c.group is program.groups[group])

    size = 4 << 20
    assert sent(_lowered(EACH), 4) == pytest.approx(3 * 3 / 4 * size, rel=1e-4)
    assert sent(_lowered(EACH, {"keep": True}), 4) == pytest.approx(2 * 3 / 4 * size, rel=1e-4)


def test_clipped_gradients_wait_for_the_norm() -> None:
    program = _lowered(EACH, clips=True)
    end = len(training_graph(MLP).compute) - 1
    assert all(_placed(program, i)["update"] == [end] for i in range(len(EACH)))


def test_nothing_lies_behind_the_end_of_the_graph() -> None:
    program = _lowered([[name for name, _ in MLP]])
    assert max(p.position for p in program.placed) < len(training_graph(MLP).compute)


def test_gradients_and_parameters_do_not_queue_behind_one_another() -> None:
    calls = _lowered(EACH).calls
    assert {c.communicator for c in calls if isinstance(c.op, AllGather)} == {1}
    assert {c.communicator for c in calls if isinstance(c.op, ReduceScatter)} == {0}


def _devices_of(memory: str, bandwidth: str = "1 Gbit/s") -> ClusterSpec:
    return ClusterSpec.loads(
        f"hosts: [{{name: a, count: 4, devices: {{kind: cpu, memory: {memory}}}}}]\nnetwork: {{bandwidth: {bandwidth}}}"
    )


def test_memory_is_a_share_and_two_groups() -> None:
    """32 MiB of parameters and 64 of state, by four; and what is gathered, packed or received of a few groups."""
    graph = training_graph(MLP)
    peak = {}
    for name in ("all_reduce_4MiB", "zero1", "sharded"):
        prediction = build_plan(name, graph, cpu_hosts(4), Context(4)).prediction
        assert prediction is not None
        peak[name] = prediction.peak_memory_bytes / 2**20
    assert peak["sharded"] < 24 + 7 * 4 < peak["zero1"] < peak["all_reduce_4MiB"]


def test_a_model_that_fits_no_other_way_is_sharded() -> None:
    graph, budget = training_graph(MLP), Budget(evaluations=80)
    used = {g.strategy for g in search(graph, _devices_of("60 MiB"), Context(4), budget=budget).groups}
    assert "sharded_parameters" in used
    for bandwidth in ("200 Mbit/s", "1 Gbit/s", "10 Gbit/s"):
        roomy = search(graph, _devices_of("1 GiB", bandwidth), Context(4), budget=budget)
        assert "sharded_parameters" not in {g.strategy for g in roomy.groups}


def test_what_cannot_be_shared_out_says_why() -> None:
    graph = training_graph([*MLP, ("scale", ())])
    for context, name, why in (
        (Context(4), "scale", "a single number, which has no rows"),
        (Context(4, has_optimizer=False), "0.weight", "needs the optimizer"),
        (Context(4, elementwise_update=False), "0.weight", "not elementwise"),
    ):
        group = SyncGroup(strategy="sharded_parameters", members=(ParameterSlice(name=name),))
        with pytest.raises(PlanError, match=why):
            lower_plan([group], graph, context)
