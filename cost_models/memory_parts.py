"""What a rank's memory is taken by at the step's fullest moment: the same figures whose sum is the predicted peak."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from autopar.cost_models.buffers import Bytes
from autopar.cost_models.memory import Course, MemoryModel
from autopar.cost_models.optimizers import OptimizerCost
from autopar.strategies.lowering import StepProgram


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes of one rank, at the moment at which they add up to most."""

    parameters: int
    """Bytes of the parameters, without those that live on other ranks between steps."""
    gradients: int
    """Bytes of complete gradients, and of those that are packed to be sent; not of those that the backward pass is
    still computing."""
    optimizer_state: int
    activations: int
    """Bytes that the graph's nodes hold: activations, and what is computed from them on the way to the gradients."""
    communication: int
    """Bytes of the collectives' buffers: sums, parts of other ranks, gathered parameters."""
    other: int
    """Bytes of the model's buffers, the batch, and what strategies keep from step to step."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def memory_parts(model: MemoryModel, program: StepProgram, optimizer: OptimizerCost, rank: int) -> MemoryParts:
    """The parts of one rank's peak memory; they add up to `model.peaks(program, optimizer)[rank]`."""
    graph = model.fixed_bytes - model.parameter_bytes
    if not program.groups:
        return MemoryParts(model.parameter_bytes, 0, 0, int(model.live.max()), 0, graph)
    course = model.course(program)
    column = int(course.of_rank[rank])
    updated, elsewhere, kept = (int(x) for x in course.lasting[:, column])
    live, gradients, alive = _fullest(course, column)
    packs = np.array([program.calls[i].op.takes_gradients for i in course.made_by], dtype=bool)
    buffered = course.sizes[:, column] * alive
    packed = int(buffered[packs].sum())
    return MemoryParts(
        parameters=model.parameter_bytes - elsewhere,
        gradients=gradients + packed,
        optimizer_state=optimizer.state_tensors * updated,
        activations=live - gradients,
        communication=int(buffered.sum()) - packed,
        other=graph + kept,
    )


def _fullest(course: Course, column: int) -> tuple[int, int, Bytes]:
    """At the fullest moment: bytes of the graph and of complete gradients, of the latter alone, and how often each
    buffer is there (twice, where the step before has left it and this one makes it anew)."""
    ends = np.append(course.cuts[1:], len(course.live))
    at = np.array([a + int(course.live[a:b].argmax()) for a, b in zip(course.cuts, ends, strict=True)])
    nodes = course.live[at] + course.held[:, column]
    calls = course.behind + course.buffered[:, column]
    alive = np.zeros(len(course.sizes), np.int64)
    alive[course.late] = 1
    last = np.where(course.last < 0, len(calls) - 1, course.last)
    if len(calls) and calls.max() > nodes.max():
        c = int(calls.argmax())
        alive += (course.made_at <= c).astype(np.int64) - (last < c)
        return int(course.behind[c]), int(course.complete[c]), alive
    s = int(nodes.argmax())
    before = course.before[s]
    alive += (course.made_at < before).astype(np.int64) - (last < before)
    return int(course.live[at[s]]), int(course.running[at[s]]), alive
