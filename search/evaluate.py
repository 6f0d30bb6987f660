"""The evaluator: lowers and prices plans, remembers them, and keeps account of the budget."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace

from autopar.cost_models.steps import predict_steps
from autopar.errors import PlanError, SpecError
from autopar.search.base import Budget, Candidate, Problem, Progress, executed
from autopar.search.builders import BASELINES
from autopar.search.journal import Journal
from autopar.spec.plan import SyncGroup
from autopar.strategies.lowering import fidelity_of

MOST_SHOWN_S = 86_400.0
"""Seconds of a time budget from which on messages leave it out, as good as without an end."""
CHECKED = 8
"""Plans of a journal that are priced again, to see whether prices are still the same."""


class Evaluator:
    """Prices sync groups for one problem: call it with a name and groups."""

    def __init__(
        self, problem: Problem, budget: Budget, journal: Journal | None = None, progress: Progress | None = None
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.candidates: list[Candidate] = []
        self.best: Candidate | None = None
        self.best_seed: Candidate | None = None
        """The best of the seeds, once all are priced."""
        self._baseline: Candidate | None = None
        self._journal = journal
        self._progress = progress
        self._known: dict[Hashable, Candidate | None] = {}
        self._began = time.monotonic()
        self._recorded: dict[Hashable, tuple[Candidate, float]] = {}
        """By what is executed: plans that an earlier search priced, and the seconds that each took there."""
        self._replayed_s = 0.0
        """Seconds that the recorded plans took that were asked for."""
        self._free = 0
        self._allowed: dict[Hashable, bool] = {}

    def resume(self, recorded: Sequence[tuple[Candidate, float]]) -> None:
        """Takes prices from a search that was cut short, each with the seconds for which that search had run by then.
        A recorded plan takes as many seconds of the budget, once it is asked for, as it took there.

        Raises `SpecError` where prices have changed since, judged by some of them."""
        for then, _ in recorded[:: max(1, len(recorded) // CHECKED)]:
            self._check(then)
        before_s = 0.0
        for candidate, elapsed_s in recorded:
            self._recorded.setdefault(executed(candidate.groups), (candidate, max(0.0, elapsed_s - before_s)))
            before_s = max(before_s, elapsed_s)

    def check(self, chosen: Candidate) -> None:
        """Prices a plan once more that was taken from the journal. Raises `SpecError` where it has another price."""
        if executed(chosen.groups) in self._recorded:
            self._check(chosen)

    def _check(self, then: Candidate) -> None:
        now = self._price(then.name, then.groups)
        if now is None or _price_of(now) != _price_of(then):
            raise SpecError(
                f"the journal cannot be resumed: plan '{then.name}' has another price today than there. The batch, the "
                "calibration, the optimizer or autopar's version is another one, a batch of random indices is drawn "
                "without a seed, or the journal was changed; leave --resume out, or begin another journal"
            )

    @property
    def unasked(self) -> list[Candidate]:
        """Recorded plans that this search has not asked for. There are some where a limit in seconds ends parts of it
        elsewhere than in the search that recorded them."""
        return [candidate for key, (candidate, _) in self._recorded.items() if key not in self._known]

    def end_of_seeds(self) -> None:
        """From here on, evaluations count against the budget."""
        self._free = len(self._known)
        self.best_seed = self.best

    @property
    def elapsed_s(self) -> float:
        """Seconds that the search has taken, those of recorded plans included."""
        return time.monotonic() - self._began

    @property
    def used(self) -> float:
        """The part of the budget that is used up, 0 to 1 and above; all of it where the search is to stop."""
        if self.budget.stop.is_set():
            return float("inf")
        evaluations = (len(self._known) - self._free) / max(1, self.budget.evaluations)
        elapsed = self.elapsed_s / max(1e-9, self.budget.time_s)
        return max(evaluations, elapsed)

    @property
    def priced(self) -> int:
        """How many different plans were asked for, those included that cannot be used."""
        return len(self._known)

    @property
    def spent(self) -> bool:
        return self.used >= 1.0

    def __call__(self, name: str, groups: tuple[SyncGroup, ...]) -> Candidate | None:
        """The priced plan, from memory where it was priced before; `None` where a strategy cannot be used on what its
        group holds, is not of the fidelity that is allowed, or breaks the constraints, which takes no evaluation."""
        if not self.problem.rules.admit(groups):
            return None
        key = executed(groups)
        if key in self._known:
            return self._known[key]
        then, took_s = self._recorded.get(key, (None, 0.0))
        self._replayed_s += took_s
        self._began = min(self._began, time.monotonic() - self._replayed_s)
        candidate = self._known[key] = self._price(name, groups) if then is None else replace(then, name=name)
        if candidate is not None:
            self._remember(candidate, is_new=then is None)
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

    def _remember(self, candidate: Candidate, is_new: bool) -> None:
        self.candidates.append(candidate)
        if self.best is None or candidate.order < self.best.order:
            self.best = candidate
        if self._journal is not None and is_new:
            self._journal.write(candidate, self.elapsed_s)
        if self._progress is not None:
            self._progress(self._standing(candidate), len(self.candidates), self.best.step_time_s)

    def _standing(self, candidate: Candidate) -> str:
        """What is priced, where the best so far stands beside what users have today, and how much time is left."""
        base = self._baseline
        if candidate.name in BASELINES and candidate.feasible and (base is None or candidate.order < base.order):
            base = self._baseline = candidate
        assert self.best is not None
        told = [] if base is None else [f"{self.best.step_time_s / base.step_time_s:.2f} of {base.name}'s step"]
        left_s = self.budget.time_s - self.elapsed_s
        told += [f"{max(0.0, left_s):.0f} s left"] if left_s < MOST_SHOWN_S else []
        return f"{candidate.name} ({', '.join(told)})" if told else candidate.name


def _price_of(candidate: Candidate) -> tuple[object, ...]:
    return candidate.estimate.prediction(), candidate.estimate.peak_memory_bytes, candidate.overflow_bytes


def overflow_bytes(problem: Problem, peak_memory_bytes: tuple[int, ...], reserved: bool = True) -> int:
    """By how much the fullest rank exceeds what it may take of its device's memory, 0 where all fit; all of it may be
    taken unless it is `reserved`."""
    whole = (int(place.device.memory_bytes.value) for place in problem.topology.ranks)
    limits = problem.memory_limits if reserved else whole
    return max(0, *(peak - limit for peak, limit in zip(peak_memory_bytes, limits, strict=True)))
