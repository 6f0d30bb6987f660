"""What a plan takes of its fullest rank's memory, by what takes it."""

from __future__ import annotations

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.memory_parts import memory_parts
from autopar.search.base import Candidate, Problem
from autopar.spec.memory_use import MemoryUse
from autopar.strategies.lowering import lower_plan
from autopar.strategies.timing import cycle


def memory_use(problem: Problem, plan: Candidate) -> MemoryUse | None:
    """Of the rank with the least to spare; `None` where the cost model says another peak than the operations do."""
    peaks, places = plan.estimate.peak_memory_bytes, problem.topology.ranks
    reserve = problem.constraints.memory_reserve
    memory = [int(place.device.memory_bytes.value) for place in places]
    limits = [int(place.device.memory_bytes.value * (1 - reserve)) for place in places]
    rank = max(range(len(peaks)), key=lambda r: peaks[r] - limits[r])
    pricer = problem.pricer or StepPricer(problem.graph, problem.topology)
    # Where steps differ, that of the fullest one.
    for moments, _ in cycle(plan.groups):
        program = lower_plan(plan.groups, problem.graph, problem.context, moments)
        parts = memory_parts(pricer.memory, program, pricer.optimizer, rank)
        if parts.total == peaks[rank]:
            return MemoryUse(
                rank=rank,
                device=places[rank].device.kind,
                device_bytes=memory[rank],
                reserve_bytes=memory[rank] - limits[rank],
                parameters_bytes=parts.parameters,
                gradients_bytes=parts.gradients,
                optimizer_bytes=parts.optimizer_state,
                activations_bytes=parts.activations,
                communication_bytes=parts.communication,
                other_bytes=parts.other,
            )
    return None
