"""The choice among lossy methods under a declared budget: the fastest plan that is shown to keep to it.

1. Candidates: plans that are predicted to be faster than the fastest one that loses nothing but bits (`candidates`).
2. Each is probed on copies of the job, for some tens of steps (`probe`); a map that was learned from other tasks says
   what a whole training will lose (`degradation`). Plans that are expected to lose more than the budget are left out.
3. A few of the rest are piloted (`worth_a_pilot`): they train copies for longer, and the user's own metric judges
   (`pilots`).
4. The fastest is taken that either of the two vouches for, and neither speaks against. None is an answer, too.

Pilots take at most a tenth of the steps that the training will have, and probes about a minute.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from autopar.quality.budget import QualityBudget, stream_kept
from autopar.quality.candidates import (
    ROUNDED,
    Candidate,
    Plans,
    begun_exactly,
    exactly,
    fastest,
    first_lossy,
    priced,
)
from autopar.quality.degradation import Loss, Map, shipped
from autopar.quality.methods import method_of, optimizer_of
from autopar.quality.pilots import Piloted, Pilots
from autopar.quality.probe import Job, Probe, Probed
from autopar.quality.verdict import NOT_TRIED, SHOWN, SLOWER, TOO_MUCH, Shown
from autopar.runtime.job.process_group import Rendezvous
from autopar.runtime.loss_scale import UNKEPT
from autopar.runtime.optimizers.kinds import kind_of
from autopar.spec.plan import Plan
from autopar.spec.quality import Considered, QualityChoice
from autopar.strategies.lowering import fidelity_of

SPENT = 0.1
"""Part of the training's steps that pilots take together, at most."""
AHEAD, AHEAD_S = 0.02, 10.0
"""Of these, the part of the training's steps that a copy trains exactly before it is probed, as the very first steps
are unlike all others; and the seconds that it may take, as far as its first `TIMED_STEPS` tell."""
TIMED_STEPS = 8
PROBE_STEPS = 32
"""Two of the longest periods that are considered."""
PROBED_S = 45.0
MOST_PROBED = 16
MOST_VOUCHED, MOST_HOPED = 2, 2
"""Plans that are piloted at most: of those that the map's bound vouches for, the fastest; and of faster ones that a
pilot can vouch for, those that save most in the mean, as the map knows how often their like keeps to the budget."""
PERIODS_SEEN = 2
"""From one average to the next, that a pilot must last for: before, nobody has seen what averages do."""
LEAST_CHANCE = 0.02
"""What two exact pilots are taken to differ by at least, as they may happen to end alike. [Empirical: 0.03 to 0.4 on
seven tasks of benchmarks/budget]"""


def choose(job: Job, plans: Plans, budget: QualityBudget, learned: Map | None = None) -> Plan:
    """Chooses for a job, whose model and optimizer stay as they are; the plan's `quality` says why. By all ranks
    together."""
    return _Chooser(job, plans, budget, learned or shipped()).plan()


@dataclass(frozen=True)
class Hopeful:
    """A candidate that is not expected to lose more than the budget."""

    candidate: Candidate
    loss: Loss
    method: str
    """What it loses by, in the map's words."""
    divergence: float
    """Of its probe."""
    lag_steps: float
    """How many steps it was behind exact training at the end of its probe: what it keeps is sent later, and is missing
    at the end of a pilot, which is short, and not at the end of a training."""
    apart: float
    """How far its probe ended from the exact one, in what other batches make of that."""


def worth_a_pilot(kept: Sequence[Hopeful], otherwise: Candidate, budget: float, chance: float) -> list[Hopeful]:
    """Those of some plans that are worth a pilot, in the same order: the fastest first. `otherwise`: what is taken
    where none is shown to keep to the budget; `chance`: what two exact pilots differ by."""
    vouched = [one for one in kept if one.loss.bound <= budget][:MOST_VOUCHED]
    limit_s = (vouched[0].candidate if vouched else otherwise).training_step_s

    def saved_s(one: Hopeful) -> float:
        return one.loss.chance_within(budget) * (limit_s - one.candidate.training_step_s)

    faster = [one for one in kept if one not in vouched and one.candidate.training_step_s < limit_s]
    can_be_shown = [one for one in faster if Shown(one.loss, 0.0, chance, 0.0, one.apart).verdict(budget) == SHOWN]
    hoped = sorted(can_be_shown, key=saved_s, reverse=True)[:MOST_HOPED]
    return [one for one in kept if one in hoped or one in vouched]


class _Chooser:
    """One choice. Plans are made on rank 0; all ranks train."""

    def __init__(self, job: Job, plans: Plans, budget: QualityBudget, learned: Map) -> None:
        self._job, self._plans, self._budget, self._learned = job, plans, budget, learned
        self._left = int(SPENT * budget.steps)
        self._trained = 0
        with stream_kept(job.device):
            self._batches = budget.taken(self._left + 2 * PROBE_STEPS)
        self._considered: list[Considered] = []
        self._chance: float | None = None
        self._probe_s: float | None = None
        self._pilot_steps = 0
        self._note = ""

    def plan(self) -> Plan:
        """Exact training is the answer where no other is better."""
        began = time.monotonic()
        exact, rounded, lossy = self._priced()
        chosen = exact
        if rounded is not None or lossy:
            plain = self._plain()
            base = self._ahead(plain)
            probed = time.monotonic()
            probe = Probe(base, plain, self._batches, PROBE_STEPS)
            most = self._most_probed((time.monotonic() - probed) / 2)
            self._trained += 2 * PROBE_STEPS
            kept = self._within(probe, [*fastest(lossy, most), *([rounded] if rounded else [])])
            self._probe_s = float(self._of_rank_0("seconds", lambda: f"{time.monotonic() - began:.3g}"))
            sure = next((h for h in kept if h.candidate is rounded and h.loss.bound <= self._budget.loss), None)
            chosen = exact if sure is None else sure.candidate
            if tried := [one for one in kept if one is not sure]:
                chosen = self._piloted(base, plain, tried, chosen) or chosen
            if sure is not None:
                self._say(sure, SHOWN if chosen is sure.candidate else SLOWER)
        choice = QualityChoice(
            budget=self._budget.loss,
            exact_step_s=exact.step_time_s,
            considered=tuple(sorted(self._considered, key=lambda one: one.training_step_s or one.step_time_s)),
            chance=_number(self._chance),
            steps=self._trained,
            probe_s=self._probe_s,
            pilot_steps=self._pilot_steps,
            note=self._note,
            optimizer=kind_of(self._job.optimizer),
        )
        return self._warmed_up(chosen.plan).model_copy(update={"name": chosen.name, "quality": choice})

    def _priced(self) -> tuple[Candidate, Candidate | None, list[Candidate]]:
        """The fastest exact plan; the fastest that rounds, where it is faster; and those that lose more, and are worth
        it beside both."""

        def make() -> str:
            made = [c for c in priced(self._job.context, self._plans, self._budget.steps) if self._may_run(c.plan)]
            return json.dumps([(c.name, c.plan.model_dump_json(), c.training_step_s) for c in made])

        told = json.loads(self._of_rank_0("candidates", make))
        exact, *others = (Candidate(name, Plan.loads(text, "rank 0's plan"), s) for name, text, s in told)
        return exact, next((c for c in others if c.name == ROUNDED), None), [c for c in others if c.name != ROUNDED]

    def _may_run(self, plan: Plan) -> bool:
        """Whether the job's loss scaling allows a plan."""
        return self._job.settings.scaler is None or fidelity_of(plan.groups, self._job.context) in UNKEPT

    def _plain(self) -> Plan:
        """What copies are trained by exactly, since it leaves parameters whole: any exact plan has its numbers. No pin
        counts for it."""
        text = self._of_rank_0("plan", lambda: self._plans.plain().model_dump_json())
        return Plan.loads(text, "rank 0's plan")

    def _of_rank_0(self, what: str, make: Callable[[], str]) -> str:
        return Rendezvous(self._job.group).from_rank_0(what, make)

    def _most_probed(self, probe_s: float) -> int:
        """How many probes there is time for, as long as each takes so many seconds."""
        fit = int(PROBED_S / max(probe_s, 1e-3))
        return int(self._of_rank_0("probes", lambda: str(max(1, min(MOST_PROBED, fit)))))

    def _ahead(self, exact: Plan) -> Job:
        """A copy of the job, some exact steps ahead."""
        base = self._job.copy()
        count = max(1, int(AHEAD * self._budget.steps))
        program = base.program(exact)
        program.step(self._batches[0])
        began, timed = time.monotonic(), min(count, TIMED_STEPS)
        for batch in self._batches[1:timed]:
            program.step(batch)
        step_s = (time.monotonic() - began) / max(1, timed - 1)
        fit = int(self._of_rank_0("steps ahead", lambda: str(int(AHEAD_S / max(step_s, 1e-6)))))
        count = min(count, max(timed, fit))
        for batch in self._batches[timed:count]:
            program.step(batch)
        program.synchronize_buffers()  # as those of pilots are when they are judged
        self._left, self._trained = self._left - count, self._trained + count
        self._pilot_steps += count
        self._batches = self._batches[count:]
        return base

    def _within(self, probe: Probe, lossy: Sequence[Candidate]) -> list[Hopeful]:
        """Those that are not expected to lose more than the budget."""
        kept = []
        for candidate in lossy:
            probed = self._probed(probe, candidate)
            method = method_of(candidate.plan.groups, self._job.context)
            loss = self._learned.of(probed, method, optimizer_of(self._job.optimizer))
            lag_steps = max(0.0, probed.lag) * PROBE_STEPS
            one = Hopeful(candidate, loss, method, probed.divergence, lag_steps, probed.noise)
            if loss.expected <= self._budget.loss:
                kept.append(one)
            else:
                self._say(one, TOO_MUCH)
        return kept

    def _probed(self, probe: Probe, candidate: Candidate) -> Probed:
        """What rank 0 has found: processors may round otherwise than its own, and all ranks must decide alike."""
        self._trained += PROBE_STEPS
        probed = probe.of(candidate.plan)
        return Probed(**json.loads(self._of_rank_0("probe", lambda: json.dumps(asdict(probed)))))

    def _piloted(self, base: Job, plain: Plan, kept: Sequence[Hopeful], otherwise: Candidate) -> Candidate | None:
        """The fastest that its pilot does not speak against, of those that the pilot or the map's bound vouches for."""
        budget = self._budget
        # A pilot must last for some averages to vouch for a plan, beside two exact ones of the same length.
        lasting = [one for one in kept if one.loss.bound <= budget.loss or 3 * self._least_pilot(one) <= self._left]
        possible = worth_a_pilot(lasting, otherwise, budget.loss, LEAST_CHANCE)
        if not possible:
            for one in kept:
                self._say(one, NOT_TRIED)
            return None
        steps = self._left // (2 + len(possible))
        self._piloted_for(2 * steps)
        pilots = Pilots(base, plain, self._batches, steps, budget.metric, budget.higher_is_better)
        self._chance = max(LEAST_CHANCE, pilots.chance)
        tried = worth_a_pilot(lasting, otherwise, budget.loss, self._chance)
        if not pilots.gained:
            self._note = (
                f"In {steps} steps of a pilot, exact training made the metric no better ({pilots.start:.5g} before, "
                f"{pilots.exact:.5g} behind): the map alone decided. Is higher_is_better={budget.higher_is_better} as "
                "you mean it?"
            )
        chosen = None
        for one in kept:
            if one not in tried or chosen is not None:
                self._say(one, NOT_TRIED if chosen is None else SLOWER)
                continue
            piloted = pilots.of(one.candidate.plan)
            self._piloted_for(steps)
            is_number = math.isfinite(piloted.metric)
            vouches = steps >= self._least_pilot(one)
            chance = self._chance if vouches else math.inf
            shown = Shown(one.loss, piloted.lost, chance, one.lag_steps / steps, one.apart, is_number)
            verdict = shown.verdict(budget.loss)
            self._say(one, verdict, piloted, shown)
            chosen = one.candidate if verdict == SHOWN else None
        return chosen

    @staticmethod
    def _least_pilot(one: Hopeful) -> int:
        """The steps of a pilot that can vouch for a plan."""
        return PERIODS_SEEN * max(g.every for g in one.candidate.plan.groups)

    def _piloted_for(self, steps: int) -> None:
        self._trained, self._pilot_steps = self._trained + steps, self._pilot_steps + steps

    def _say(self, one: Hopeful, verdict: str, piloted: Piloted | None = None, shown: Shown | None = None) -> None:
        steps, context = self._budget.steps, self._job.context
        candidate, loss = one.candidate, one.loss
        self._considered.append(
            Considered(
                name=candidate.name,
                step_time_s=candidate.step_time_s,
                exact_steps=first_lossy(candidate.plan, steps, context),
                training_step_s=candidate.training_step_s,
                expected=_number(loss.expected),
                bound=_number(loss.bound),
                lost=None if piloted is None else _number(piloted.lost),
                metric=None if piloted is None else _number(piloted.metric),
                late=None if shown is None else shown.late,
                apart=None if shown is None else _number(shown.apart),
                method=one.method,
                divergence=_number(one.divergence),
                exactly=exactly(candidate.plan, context),
                verdict=verdict,
            )
        )

    def _warmed_up(self, plan: Plan) -> Plan:
        """The plan, whose lossy groups begin behind exact steps: a tenth of all, or as many as their strategies ask."""
        begun = begun_exactly(plan, self._budget.steps, self._job.context)
        if begun.groups == plan.groups:
            return plan
        text = self._of_rank_0("plan", lambda: self._plans.price(begun).model_dump_json())
        return Plan.loads(text, "rank 0's plan")


def _number(value: float | None) -> float | None:
    """What a file can hold: no infinity."""
    return value if value is not None and math.isfinite(value) else None
