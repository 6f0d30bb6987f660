"""The loop: search by prices, run the finalists, learn from them, search again, until no trial pays any more."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Protocol

import numpy as np

from autopar.cost_models import CorrectedCostModel, Observation
from autopar.cost_models.base import Lesson
from autopar.cost_models.own_trials import NOISE
from autopar.cost_models.trial_log import TrialRecord
from autopar.errors import AutoparWarning
from autopar.formatting import duration, number_of
from autopar.lab.trial import TrialResult, relative_spread
from autopar.search import Budget, Candidate, SearchResult, plan_of, search_again, searcher_named
from autopar.search.base import choose, executed
from autopar.search.builders import BASELINES
from autopar.search.searchers import DEFAULT
from autopar.spec.lines import Lines
from autopar.spec.plan import Measured, Plan
from autopar.strategies.lowering import lower_plan
from autopar.strategies.timing import cycle
from autopar.trials.decide import credibility, expected_part, expected_saving_s, unlike, worth_trying
from autopar.trials.standings import Lead, Standings

A_ROUND = 4
"""Plans that are run in turn with each other, at most."""
WITHIN = 60
"""Candidates that are looked at for a trial: the fastest by their predictions."""
OWN = 0.01
"""Standard deviation, in logarithms, of what a plan takes beside others of the same features. [Assumed]"""
HOPELESS = 2
"""Rounds in a row in which every plan failed, after which no more are run: what fails is something else than a plan."""
START_S = 20.0
"""What the ranks take to start and to capture a model, before it is known. [Guessed]"""
FIRST_STEPS = 40
"""Steps of a trial, before it is known what one takes."""

Tell = Callable[[str, int, float], None]


class Runs(Protocol):
    """What measures plans: `autopar.trials.Measure`."""

    @property
    def where(self) -> str: ...

    def __call__(
        self,
        plans: Mapping[str, Plan],
        fits: Callable[[int], bool],
        stopped: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> dict[str, TrialResult]: ...


@dataclass(frozen=True)
class Trials:
    """From what a search has found to the plan that is taken; for `SearchOptions.finalists`."""

    measure: Runs
    most: int | None = None
    """How many trials may be run; a trial is one plan, measured once."""
    steps: int | None = None
    """How many steps the training will have: a trial is run only where it is expected to pay. Without, all are run of
    which something is expected."""
    log: Path | None = None
    """A file to which every trial is appended, for the next search on this cluster."""
    again: Budget = field(default_factory=Budget)
    """What each further search may spend."""
    searcher: str = DEFAULT
    """Of the further searches; a name of `autopar.search.SEARCHERS`."""
    tell: Tell = lambda what, priced, best_s: None
    seed: int = 0
    stop: Event = field(default_factory=Event, compare=False)
    """Ends the trials when it is set; the best plan so far is taken."""
    all_failed: Event = field(default_factory=Event, compare=False)
    """Is set where trials were run, and no plan that may be taken ended well."""

    def __call__(self, found: SearchResult) -> Plan:
        if not isinstance(found.problem.cost_model, CorrectedCostModel):
            raise TypeError("trials are learned from, which takes a CorrectedCostModel")
        if not found.chosen.feasible or found.problem.context.world_size == 1:
            return found.plan
        return _Loop(self, found, found.problem.cost_model).run()


@dataclass(frozen=True)
class _Tried:
    """A plan that was measured."""

    candidate: Candidate
    result: TrialResult
    """The last one."""
    lesson: Lesson
    """What it teaches, as it was measured."""


class _Loop:
    def __init__(self, trials: Trials, found: SearchResult, model: CorrectedCostModel) -> None:
        self.trials, self.found, self.model = trials, found, model
        self.tried: dict[Hashable, _Tried] = {}
        """Those that were measured, and have not failed since; the baseline, too, where pins exclude it."""
        self.standings = Standings()
        self.known_before = model.lessons_
        self.expected = (np.zeros(0), np.zeros((0, 0)))
        """What the cost model expected of the plans in `tried` before this search ran any."""
        self.failed: set[Hashable] = set()
        self.spent = self.failures = 0
        self.last_error = ""
        self.priced = len(found.candidates)
        self.elapsed_s = 0.0
        """Seconds that the rounds took, with the searches after them."""
        self.mark: tuple[Hashable, float] | None = None
        """The best plan when trials had paid for themselves last, at first the one that prices preferred, and the
        seconds that they had taken by then."""
        self.promised = self.in_vain = 0.0
        """Parts of a step that the last round was expected to save at most, and that all rounds since were."""
        as_today = found.seeds | found.baselines
        fitting = [c for name, c in as_today.items() if name in BASELINES and c.feasible]
        self.baseline = min(fitting, key=lambda c: c.order, default=None)

    def run(self) -> Plan:
        empty = 0
        while empty < HOPELESS and (members := self._round()):
            began = time.monotonic()
            empty = 0 if self._run(members) else empty + 1
            if not self.trials.stop.is_set():
                starts = [*(t.candidate for t in self.tried.values()), *self._fastest()]
                self.found = search_again(
                    self.found,
                    self.model,
                    starts,
                    self.trials.again,
                    searcher=searcher_named(self.trials.searcher),
                    seed=self.trials.seed,
                )
                self.priced += len(self.found.candidates)
            self.elapsed_s += time.monotonic() - began
            self._see_what_it_paid(executed(members[0].groups))
        if self.failures and not self._able:
            self.trials.all_failed.set()
            but = f" but that of {self.baseline.name}" if self.baseline is not None and self.tried else ""
            warnings.warn(
                f"all {number_of(self.failures, 'trial')}{but} failed, so the plan rests on its prediction alone; the "
                f"last: {self.last_error}",
                AutoparWarning,
                stacklevel=2,
            )
        return self._winner()

    def _see_what_it_paid(self, first: Hashable) -> None:
        """Behind a round. `first`: the plan that the others were compared with in it."""
        if not self._able:
            return
        if self.mark is None or self.mark[0] not in self.tried:
            self.mark = (first if first in self.tried else self._best(), 0.0)
        (before, then_s), best = self.mark, self._best()
        saved_s = -math.expm1(self._lead(best, before).shown) * self.standings.seconds(before)
        self.in_vain += self.promised
        if saved_s * (self.trials.steps or 0) > self.elapsed_s - then_s:
            self.mark, self.in_vain = (best, self.elapsed_s), 0.0

    def _fastest(self) -> list[Candidate]:
        """Those that can be measured, by their predictions: plans whose steps are all alike, and that have not failed.
        Each once."""
        each = {executed(c.groups): c for c in sorted(self.found.candidates, key=lambda c: c.order) if c.feasible}
        return [c for k, c in each.items() if k not in self.failed and len(cycle(c.groups)) == 1][:WITHIN]

    def _round(self) -> list[Candidate]:
        """The plans to run next; none where no trial is left, or none pays."""
        left = A_ROUND if self.trials.most is None else min(A_ROUND, self.trials.most - self.spent)
        fastest, is_first = self._fastest(), not self._able
        if self.trials.stop.is_set() or left < (1 if is_first else 2) or not fastest:
            return []
        if is_first:
            chosen = self.found.chosen  # not always the fastest: the simplest of those that are as fast
            reference = chosen if chosen in fastest else fastest[0]
            best_s = reference.step_time_s
        else:
            key = self._best()
            reference, best_s = self.tried[key].candidate, self.standings.seconds(key)
        others = unlike([c for c in fastest if executed(c.groups) not in self.tried], reference)
        savings_s = self._saved_by_trying(others, reference, best_s)
        again = [t.candidate for t in self._able.values() if t.candidate is not reference]
        others += again
        savings_s += [self._saved_by_repeating(c, reference) for c in again]
        self.promised = max(savings_s, default=0.0) / best_s
        if self.trials.steps is not None:
            savings_s = [credibility(self.in_vain) * saving_s for saving_s in savings_s]
        paying = worth_trying(savings_s, best_s, self.trials.steps, self._trial_s(reference))
        if not paying and not (is_first and self.trials.steps is None):
            return []
        members = [reference]
        if is_first and self.baseline is not None and executed(self.baseline.groups) != executed(reference.groups):
            members.append(self.baseline)  # also where it is slow: it tells how far off plans are that are unlike
        taken = {executed(c.groups) for c in members}
        rest = [others[i] for i in paying if executed(others[i].groups) not in taken]
        return [*members, *self._among(rest, left - len(members))][:left]

    @property
    def _able(self) -> dict[Hashable, _Tried]:
        """Those of the measured plans that may be taken."""
        return {key: t for key, t in self.tried.items() if self.found.problem.rules.admit(t.candidate.groups)}

    def _best(self) -> Hashable:
        """The first one, unless another is shown to be faster: of plans that are alike, the luckiest took least."""
        first = next(iter(self._able))
        return min(self._able, key=lambda key: self._lead(key, first).shown)

    def _lead(self, key: Hashable, over: Hashable) -> Lead:
        """What is known of a plan's time in another's: as it was measured, beside what was expected before."""
        if key == over:
            return self.standings.lead(key, over)
        at = [list(self.tried).index(plan) for plan in (key, over)]
        expected, covariance = self.expected
        off = covariance[np.ix_(at, at)] + OWN**2 * np.eye(2)
        return self.standings.beside(dict(zip((key, over), expected[at], strict=True)), off).lead(key, over)

    def _saved_by_trying(self, others: Sequence[Candidate], best: Candidate, best_s: float) -> list[float]:
        """Seconds of a step that each plan is expected to save that was not measured. `best_s`: of the best one, as
        measured where it was."""
        problem = self.found.problem
        programs = [lower_plan(c.groups, problem.graph, problem.context) for c in (best, *others)]
        apart = self.model.apart(problem.graph, programs, problem.topology)[1:]
        said = {executed(c.groups): c.step_time_s for c in self.found.candidates}
        best_s = min(best_s, said.get(executed(best.groups), best_s))  # plans that are alike promise nothing
        moves = [self.standings.after_one_more(math.hypot(deviation, math.sqrt(2) * OWN)) for deviation in apart]
        return [expected_saving_s(best_s, c.step_time_s, move) for c, move in zip(others, moves, strict=True)]

    def _saved_by_repeating(self, candidate: Candidate, best: Candidate) -> float:
        """Seconds of a step that are expected to be saved where both are measured once more: what looks fastest may
        have been lucky."""
        lead = self._lead(executed(candidate.groups), key := executed(best.groups))
        return self.standings.seconds(key) * expected_part(lead.mean, lead.after_one_more)

    def _among(self, paying: Sequence[Candidate], count: int) -> list[Candidate]:
        """Half of them those that are expected to save most, then those that tell most of all that pay."""
        best = list(paying[: (count + 1) // 2])
        problem, more = self.found.problem, paying[len(best) :]
        if len(best) >= count or not more:
            return best
        programs = [lower_plan(c.groups, problem.graph, problem.context) for c in more]
        telling = self.model.most_telling(problem.graph, programs, problem.topology, count - len(best))
        return [*best, *(more[i] for i in telling)]

    def _trial_s(self, candidate: Candidate) -> float:
        """Seconds that one more trial is expected to take."""
        if self.spent:
            return self.elapsed_s / self.spent
        return START_S + FIRST_STEPS * candidate.step_time_s

    def _run(self, members: Sequence[Candidate]) -> bool:
        """Runs a round, puts it down, and learns from it; whether anything was measured."""
        problem = self.found.problem
        plans = {f"{i} {c.name}": self._bare(c) for i, c in enumerate(members)}
        candidates = dict(zip(plans, members, strict=True))
        self._say("a round begins")
        results = self.trials.measure(
            plans,
            lambda here: _fit(members, problem.memory_limits, here),
            self.trials.stop.is_set,
            lambda name: self._say(f"running {name}"),
        )
        blocks_s: dict[Hashable, Sequence[float]] = {}
        with _log(self.trials.log) as log:
            for name, result in results.items():
                candidate, key = candidates[name], executed(candidates[name].groups)
                lesson = self._lesson(candidate, result) if result.status == "ok" else None
                log(self._record(candidate, plans[name], result, lesson))
                self.spent += 1
                if lesson is None:
                    self.failures += 1
                    self.failed.add(key)
                    self.tried.pop(key, None)
                    self.last_error = f"{result.status}: {result.error}"
                    continue
                self.tried[key] = _Tried(self.tried[key].candidate if key in self.tried else candidate, result, lesson)
                blocks_s[key] = result.block_s or (result.step_time_s,)
        if blocks_s:
            self.standings.add(blocks_s)
        self.model.fit_lessons([*self.known_before, *map(self._taught, self.tried)])
        if self.tried:
            self.expected = self.model.expected([t.lesson for t in self.tried.values()], self.known_before)
        return bool(blocks_s)

    def _taught(self, key: Hashable) -> Lesson:
        """What a plan's trials teach, all in all: of a machine as fast as it was in the first round."""
        is_vague = self.standings.deviation(key) > NOISE
        return replace(self.tried[key].lesson, measured_s=self.standings.seconds(key), disturbed=is_vague)

    def _bare(self, candidate: Candidate) -> Plan:
        """The candidate as ranks need it."""
        problem = self.found.problem
        return Plan(
            name=candidate.name,
            model=problem.graph.model,
            cluster=problem.cluster.fingerprint,
            fidelity=problem.fidelity,
            groups=candidate.groups,
            recompute=problem.graph.recompute,
            prediction=candidate.estimate.prediction(),
        )

    def _lesson(self, candidate: Candidate, result: TrialResult) -> Lesson:
        problem = self.found.problem
        program = lower_plan(candidate.groups, problem.graph, problem.context)
        seen = Observation(problem.graph, program, problem.topology, result.step_time_s, bool(result.noise))
        return self.model.lesson([(1.0, seen)])

    def _record(self, candidate: Candidate, plan: Plan, result: TrialResult, lesson: Lesson | None) -> TrialRecord:
        found = TrialRecord(
            cluster=plan.cluster.digest,
            on=plan.cluster.summary,
            model=plan.model.digest,
            basis=self.model.basis,
            plan=candidate.name,
            digest=plan.digest,
            where=self.trials.measure.where,
            status=result.status,
            error=result.error[-2000:],
        )
        if lesson is None:
            return found
        return replace(
            found,
            noise=result.noise,
            predicted_s=candidate.step_time_s,
            simulated_s=lesson.simulated_s,
            measured_s=lesson.measured_s,
            spread=relative_spread(result.step_s),
            features=dict(lesson.features),
        )

    def _say(self, what: str) -> None:
        """Tells what is done, and how the best measured plan stands beside the baseline."""
        most = "" if self.trials.most is None else f" of at most {self.trials.most}"
        said = f"{self.spent} trials{most} done, {what}"
        if self._able:
            said += f", best measured {duration(self.standings.seconds(self._best()))}"
            base_s = self._baseline_s()
            said += f" against {duration(base_s)} of {self.baseline.name}" if self.baseline and base_s else ""
        self.trials.tell(said, self.priced, self.found.chosen.step_time_s)

    def _winner(self) -> Plan:
        """The measured best, unless another plan is predicted faster by more than the prediction's interval."""
        left = [c for c in self.found.candidates if c.feasible and executed(c.groups) not in self.failed]
        foremost = choose(left, float("inf")) if left else self.found.chosen
        if not self._able:
            return plan_of(self.found, foremost)
        best, best_s = self.tried[self._best()], self.standings.seconds(self._best())
        slowest_s = foremost.step_time_s * (1 + foremost.estimate.relative_error)
        by_trials = executed(foremost.groups) in self.tried or slowest_s >= best_s
        groups = executed((best.candidate if by_trials else foremost).groups)
        # Priced with all that was learned, where it was priced again.
        taken = next((c for c in self.found.candidates if executed(c.groups) == groups), best.candidate)
        base_s = self._baseline_s()
        measured = Measured(
            rests_on="trials" if by_trials else "prediction",
            step_time_s=best_s if by_trials else None,
            best_step_time_s=best_s,
            baseline=self.baseline.name if self.baseline is not None and base_s is not None else "",
            baseline_step_time_s=base_s,
            trials=self.spent,
            failed=self.failures,
            spread=relative_spread(best.result.step_s),
            disturbed=best.result.noise,
            where=self.trials.measure.where,
        )
        return plan_of(self.found, taken).model_copy(update={"measured": measured})

    def _baseline_s(self) -> float | None:
        """Seconds that a step of the baseline took; `None` where it was not measured."""
        key = None if self.baseline is None else executed(self.baseline.groups)
        return self.standings.seconds(key) if key in self.tried else None


def _fit(members: Sequence[Candidate], limits_bytes: Sequence[int], here_bytes: int) -> bool:
    """Whether each rank's device holds all of these plans at once, and one machine all ranks."""
    taken = [sum(peaks) for peaks in zip(*(c.estimate.peak_memory_bytes for c in members), strict=True)]
    return sum(taken) <= here_bytes and all(of <= limit for of, limit in zip(taken, limits_bytes, strict=True))


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[Callable[[TrialRecord], None]]:
    """What appends to the file of trials, where there is one."""
    if path is None:
        yield lambda record: None
        return
    with Lines(path, "file of trials") as lines:
        yield lambda record: lines.append(record.line())
