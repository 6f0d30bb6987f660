"""What a plan takes of its fullest rank's memory, by what takes it."""

from __future__ import annotations

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.memory_parts import memory_parts
from autopar.search.base import Candidate, Problem
from autopar.spec.memory_use import MemoryUse
from autopar.strategies.lowering import lower_plan
from autopar.strategies.timing import cycle, earlier


def memory_use(problem: Problem, plan: Candidate) -> MemoryUse | None:
    """The memory use of the rank with the least to spare; `None` where the cost model says another peak than the
    operations do."""
    peaks, limits = plan.estimate.peak_memory_bytes, problem.memory_limits
    rank = max(range(len(peaks)), key=lambda r: peaks[r] - limits[r])
    device = problem.topology.ranks[rank].device
    memory = int(device.memory_bytes.value)
    pricer = problem.pricer or StepPricer(problem.graph, problem.topology)
    # Where steps differ, that of the fullest one.
    for moments in (*(m for m, _ in cycle(plan.groups)), *earlier(plan.groups)):
        program = lower_plan(plan.groups, problem.graph, problem.context, moments)
        parts = memory_parts(pricer.memory_of(rank), program, pricer.optimizer, rank)
        if parts.total == peaks[rank]:
            return MemoryUse(
                rank=rank,
                device=device.kind,
                device_bytes=memory,
                reserve_bytes=memory - limits[rank],
                parameters_bytes=parts.parameters,
                gradients_bytes=parts.gradients,
                optimizer_bytes=parts.optimizer_state,
                activations_bytes=parts.activations,
                communication_bytes=parts.communication,
                other_bytes=parts.other,
            )
    return None
