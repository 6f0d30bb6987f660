"""What a plan costs where its steps differ: the mean over those that come again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.cost_models.base import CostModel, Estimate
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.spec.plan import SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies.lowering import lower_plan
from autopar.strategies.timing import changes, cycle, earlier


def predict_steps(
    cost_model: CostModel,
    groups: Sequence[SyncGroup],
    graph: TrainingGraph,
    context: Context,
    topology: Topology,
    *,
    timeline: bool = False,
    step: int | None = None,
) -> Estimate:
    """The cost of a step: times and bytes are means over steps, memory is that of the fullest. The timeline is that of
    a step in which all groups synchronize. With `step`, of steps in which no more groups have begun than in that one;
    else all have, and the fullest may be one before. Raises `PlanError` where a strategy cannot be used."""
    steps = cycle(groups, step)
    programs = [lower_plan(groups, graph, context, moments) for moments, _ in steps]
    estimates = [cost_model.predict(graph, p, topology, timeline=timeline) for p in programs]
    before = [lower_plan(groups, graph, context, moments) for moments in earlier(groups)] if step is None else []
    peaks = [e.peak_memory_bytes for e in estimates]
    peaks += [cost_model.predict(graph, p, topology).peak_memory_bytes for p in before]
    peak = tuple(map(max, zip(*peaks, strict=True)))
    if len(estimates) == 1:
        return replace(estimates[0], peak_memory_bytes=peak)
    shares = [share for _, share in steps]
    averaged = [sum((m.doing == "average") * (1 + m.slot.bit_count()) for m in moments) for moments, _ in steps]
    fullest = estimates[max(range(len(steps)), key=averaged.__getitem__)]

    def mean(of: str) -> float:
        return sum(share * float(getattr(e, of)) for share, e in zip(shares, estimates, strict=True))

    def means(of: str) -> tuple[int, ...]:
        rows = zip(*(getattr(e, of) for e in estimates), strict=True)
        return tuple(round(sum(s * v for s, v in zip(shares, row, strict=True))) for row in rows)

    return replace(
        fullest,
        step_time_s=mean("step_time_s"),
        compute_s=mean("compute_s"),
        exposed_communication_s=mean("exposed_communication_s"),
        communication_s=mean("communication_s"),
        sent_bytes=means("sent_bytes"),
        received_bytes=means("received_bytes"),
        peak_memory_bytes=peak,
        relative_error=max(e.relative_error for e in estimates),
    )


def mean_step_s(
    cost_model: CostModel,
    groups: Sequence[SyncGroup],
    graph: TrainingGraph,
    context: Context,
    topology: Topology,
    steps: int,
) -> float:
    """Seconds of a step, in the mean over a training of `steps` steps, those before groups begin included."""
    begins = sorted({0, steps, *(step for g in groups for step in changes(g) if step < steps)})
    total_s = 0.0
    for first, end in pairwise(begins):
        estimate = predict_steps(cost_model, groups, graph, context, topology, step=first)
        total_s += (end - first) * estimate.step_time_s
    return total_s / steps
