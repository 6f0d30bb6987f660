"""When slices are sent back, where they need not wait for the end of the backward pass."""

from __future__ import annotations

import pytest

from autopar.cost_models import AnalyticCostModel
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph

SMALL = [(f"{i}", (256, 256)) for i in range(8)]
GRAPH = training_graph([*SMALL, ("8", (2048, 1024)), ("9", (2048, 1024))], flops=2 * 10**9)
"""Compute takes about as long as all gradients do at 1 Gbit/s; most of them are there first, and needed last."""


def _program(early: float, first: int = len(GRAPH.parameters), **context: bool) -> StepProgram:
    """A group for each parameter; those whose gradients are complete first are sent back early."""
    by_use = sorted(GRAPH.parameters, key=lambda p: p.ready)
    groups = [
        SyncGroup(
            strategy="partitioned_parameter_server",
            members=(ParameterSlice(name=p.name),),
            options={"early": early if i < first else 0.0, "late": bool(context.get("late_parameters"))},
        )
        for i, p in enumerate(by_use)
    ]
    return lower_plan(groups, GRAPH, Context(4, **context))  # type: ignore[arg-type]


def _updates(program: StepProgram) -> list[int]:
    return [p.position for p in program.placed if p.call.op.updates]


def test_slices_are_updated_when_so_much_of_the_backward_pass_has_gone_by() -> None:
    end = len(GRAPH.compute) - 1
    ready = sorted(p.ready for p in GRAPH.parameters)
    assert _updates(_program(0.0)) == [end] * len(ready)
    assert _updates(_program(1.0)) == ready
    assert _updates(_program(0.5)) == sorted(round(end - 0.5 * (end - r)) for r in ready)


def test_clipped_slices_wait_for_the_norm() -> None:
    assert _updates(_program(0.5, clips=True)) == _updates(_program(0.0, clips=True))


def test_what_is_sent_back_early_leaves_the_next_forward_pass_less_to_wait_for() -> None:
    cluster = cpu_hosts(4)

    def step_s(early: float) -> float:
        program = _program(early, first=2, late_parameters=True)
        return AnalyticCostModel().predict(GRAPH, program, Topology(cluster)).step_time_s

    assert step_s(0.25) < 0.95 * step_s(0.0)


@pytest.mark.parametrize("early", [-0.1, 1.1])
def test_early_is_a_part_of_the_way(early: float) -> None:
    with pytest.raises(Exception, match="early"):
        _program(early)
