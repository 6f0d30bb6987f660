"""Plans that are priced apart from a search: the baseline, where pins exclude it, and single plans."""

from __future__ import annotations

from autopar.cost_models.steps import predict_steps
from autopar.search.base import Candidate, Problem, Progress
from autopar.search.builders import builder_named
from autopar.search.evaluate import overflow_bytes
from autopar.spec.plan import SyncGroup
from autopar.spec.summary import BASELINE


def candidate_of(problem: Problem, name: str, groups: tuple[SyncGroup, ...]) -> Candidate:
    """A plan, priced, whatever the constraints. Raises `PlanError` where a strategy cannot be used as it says."""
    estimate = predict_steps(problem.cost_model, groups, problem.graph, problem.context, problem.topology)
    return Candidate(name, groups, estimate, overflow_bytes(problem, estimate.peak_memory_bytes))


def baselines(problem: Problem) -> dict[str, Candidate]:
    """DDP as users have it today, by its name, where pins make another plan of it; else none. It is what plans are
    compared with, and no candidate."""
    groups = builder_named(BASELINE)(problem.graph.parameters, problem.context, problem.cluster)
    if problem.rules.admit(groups) or problem.rules.forbidden_in(groups):
        return {}
    return {BASELINE: candidate_of(problem, BASELINE, groups)}


def beside(progress: Progress, baseline: Candidate) -> Progress:
    """Tells, besides, where the best plan so far stands beside a baseline that is no candidate."""

    def tell(what: str, priced: int, best_s: float) -> None:
        progress(f"{what}, {best_s / baseline.step_time_s:.2f} of {baseline.name}'s step", priced, best_s)

    return tell
