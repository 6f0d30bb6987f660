"""The evaluator: lowers and prices plans, remembers them, and keeps account of the budget."""

from __future__ import annotations

import time
from collections.abc import Hashable

from autopar.cost_models.steps import predict_steps
from autopar.errors import PlanError
from autopar.search.base import Budget, Candidate, Problem, Progress
from autopar.search.journal import Journal
from autopar.spec.plan import SyncGroup
from autopar.strategies.lowering import fidelity_of


class Evaluator:
    """Prices sync groups for one problem: call it with a name and groups."""

    def __init__(
        self, problem: Problem, budget: Budget, journal: Journal | None = None, progress: Progress | None = None
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.candidates: list[Candidate] = []
        self.best: Candidate | None = None
        self._journal = journal
        self._progress = progress
        self._known: dict[Hashable, Candidate | None] = {}
        self._began = time.monotonic()
        self._free = 0
        self._allowed: dict[Hashable, bool] = {}

    def end_of_seeds(self) -> None:
        """From here on, evaluations count against the budget."""
        self._free = len(self._known)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._began

    @property
    def used(self) -> float:
        """The part of the budget that is used up, 0 to 1 and above."""
        evaluations = (len(self._known) - self._free) / max(1, self.budget.evaluations)
        elapsed = self.elapsed_s / max(1e-9, self.budget.time_s)
        return max(evaluations, elapsed)

    @property
    def spent(self) -> bool:
        return self.used >= 1.0

    def __call__(self, name: str, groups: tuple[SyncGroup, ...]) -> Candidate | None:
        """The priced plan, from memory where it was priced before; `None` where a strategy cannot be used on what its
        group holds, is not of the fidelity that is allowed, or breaks the constraints, which takes no evaluation."""
        if not self.problem.rules.admit(groups):
            return None
        key = tuple((g.strategy, tuple(sorted(g.settings.items())), g.members) for g in groups)
        if key in self._known:
            return self._known[key]
        candidate = self._known[key] = self._price(name, groups)
        if candidate is not None:
            self._remember(candidate)
        return candidate

    def _price(self, name: str, groups: tuple[SyncGroup, ...]) -> Candidate | None:
        problem = self.problem
        try:
            if not all(self._is_allowed(g) for g in groups):
                return None
            estimate = predict_steps(problem.cost_model, groups, problem.graph, problem.context, problem.topology)
        except PlanError:
            return None
        return Candidate(name, groups, estimate, overflow_bytes(problem, estimate.peak_memory_bytes))

    def _is_allowed(self, group: SyncGroup) -> bool:
        key = (group.strategy, tuple(sorted(group.settings.items())))
        if key not in self._allowed:
            self._allowed[key] = self.problem.allows(fidelity_of([group], self.problem.context))
        return self._allowed[key]

    def _remember(self, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        if self.best is None or candidate.order < self.best.order:
            self.best = candidate
        if self._journal is not None:
            self._journal.write(candidate)
        if self._progress is not None:
            self._progress(candidate.name, len(self.candidates), self.best.step_time_s)


def overflow_bytes(problem: Problem, peak_memory_bytes: tuple[int, ...], reserved: bool = True) -> int:
    """By how much the fullest rank exceeds what it may take of its device's memory, 0 where all fit; all of it may be
    taken unless it is `reserved`."""
    reserve = problem.constraints.memory_reserve if reserved else 0.0
    places = problem.topology.ranks
    excess = (
        p - int(r.device.memory_bytes.value * (1 - reserve)) for p, r in zip(peak_memory_bytes, places, strict=True)
    )
    return max(0, *excess)
