"""The analytic cost model, corrected by what was learned from measured steps: the lab's, and a cluster's own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np

from autopar.backends.gloo import GLOO
from autopar.backends.nccl import NCCL
from autopar.cost_models.analytic import RELATIVE_ERROR, AnalyticCostModel, NodeTimes, StepPricer
from autopar.cost_models.base import CostModel, Estimate, Lesson, Observation
from autopar.cost_models.correction import Correction, Floats
from autopar.cost_models.features import features
from autopar.cost_models.optimizers import ADAMW, OptimizerCost
from autopar.cost_models.own_trials import NOISE, NOISY, OwnTrials, Prior, covariance, most_telling
from autopar.ir.training_graph import TrainingGraph
from autopar.spec.calibration import Calibration
from autopar.spec.topology import Topology
from autopar.strategies.lowering import StepProgram

UNCORRECTED = Prior(common=1.0, own=0.1, along_compute=1.6, clip=math.log(30), parts=(2.0, 1.0, 0.5, 0.25))
"""Of predictions from data sheets: an order of magnitude, mostly of the compute, and so the same for plans of which it
is the same part. By how much each is off besides, the first trials say. [Empirical: the most likely for 39 rounds of
trials of nine workloads of the benchmarks' suite, with real compute; compute took 1.4 to 3.7 times as long as said]"""
SHIPPED = Path(__file__).parent / "learned" / "gloo.json"


class CorrectedCostModel(CostModel):
    """Multiplies the simulated step time by a factor from the plan's physical features, and says how sure it is.

    `correction` was learned from other models on other clusters; by default, what is shipped (see
    `cost_models/learned/README.md`). `fit` takes steps of this cluster: twenty plans of one model tell the next ones of
    it apart. Where a prediction rests on measured figures alone, its interval is the learned one.
    """

    def __init__(
        self,
        base: AnalyticCostModel,
        correction: Correction | None = None,
        prior: Prior | None = None,
        basis: str = "",
    ) -> None:
        """`prior`: how far off predictions are before steps of this cluster are known; by default, as the correction's
        interval has it. `basis`: tells apart what predictions rest on, in `autopar.cost_models.trial_log`."""
        self.base = base
        self.correction = correction or shipped()
        self.prior = prior
        self.basis = basis
        self.own_: OwnTrials | None = None
        self.lessons_: tuple[Lesson, ...] = ()

    def fit(self, observations: Sequence[Observation]) -> Self:
        """Learns how far its predictions are off on these; what it had learned from others before is forgotten."""
        return self.fit_lessons([self.lesson([(1.0, o)]) for o in observations])

    def fit_lessons(self, lessons: Sequence[Lesson]) -> Self:
        """As `fit`, from what was kept of observations."""
        self.lessons_ = tuple(lessons)
        self.own_ = self._taught(lessons, self.prior) if lessons else None
        return self

    def expected(self, plans: Sequence[Lesson], taught: Sequence[Lesson]) -> tuple[Floats, Floats]:
        """What would be predicted of measured plans had they not been measured: the logarithm of a step's seconds of
        each, and the covariance of the errors. `plans`: the lesson of each, whose measured seconds do not count;
        `taught`: the lessons that count. The prior's `own` is the one that all lessons so far have chosen."""
        prior = self.prior if self.own_ is None else replace(self.own_.prior, parts=(1.0,))
        rows, said = self._known(plans)
        if not taught:
            return said, covariance(self.correction, rows, prior)
        own = self._taught(taught, prior)
        return said + own.residual(rows)[0], own.covariance(rows)

    def _taught(self, lessons: Sequence[Lesson], prior: Prior | None) -> OwnTrials:
        rows, said = self._known(lessons)
        off = np.log([lesson.measured_s for lesson in lessons]) - said
        noise = np.where([lesson.disturbed for lesson in lessons], NOISY, NOISE)
        return OwnTrials.of(self.correction, rows, off, noise, prior)

    def _known(self, lessons: Sequence[Lesson]) -> tuple[Floats, Floats]:
        """The features of plans, and the logarithms of the seconds that they are predicted to take before any trial."""
        rows = np.array([[lesson.features[name] for name in self.correction.features] for lesson in lessons])
        simulated_s = np.array([lesson.simulated_s for lesson in lessons])
        return rows, np.log(simulated_s) + self.correction.residual(rows)

    def lesson(self, steps: Sequence[tuple[float, Observation]]) -> Lesson:
        """What a plan's measured step teaches. `steps`: the different ones of the plan, and the share of each."""
        each = []
        for share, seen in steps:
            pricer = self.pricer(seen.graph, seen.topology)
            estimate = pricer.estimate(seen.program)
            each.append((share, seen, estimate.step_time_s, features(seen.program, estimate, pricer)))
        return Lesson(
            features={name: sum(share * found[name] for share, *_, found in each) for name in each[0][3]},
            simulated_s=sum(share * simulated_s for share, _, simulated_s, _ in each),
            measured_s=sum(share * seen.step_time_s for share, seen, *_ in each),
            disturbed=any(seen.disturbed for _, seen, *_ in each),
        )

    def most_telling(
        self, graph: TrainingGraph, programs: Sequence[StepProgram], topology: Topology, count: int
    ) -> list[int]:
        """Which of these programs to measure for `fit`, to learn most about all of them: their places, the most telling
        first."""
        return most_telling(self.correction, self._rows(graph, programs, topology), count, self.prior)

    def apart(self, graph: TrainingGraph, programs: Sequence[StepProgram], topology: Topology) -> list[float]:
        """By how much more or less the prediction of each of these programs is off than that of the first: a standard
        deviation, in logarithms. What all are off by is none of it, and programs that are alike are off alike."""
        rows = self._rows(graph, programs, topology)
        of = covariance(self.correction, rows, self.prior) if self.own_ is None else self.own_.covariance(rows)
        variances = np.diag(of) + of[0, 0] - 2 * of[0]
        return [float(v) for v in np.sqrt(np.maximum(variances, 0.0))]

    def predict(
        self, graph: TrainingGraph, program: StepProgram, topology: Topology, *, timeline: bool = False
    ) -> Estimate:
        pricer = self.pricer(graph, topology)
        estimate = pricer.estimate(program, timeline=timeline)
        rows = self._row(program, pricer, estimate)[None, :]
        residual, half = self.correction.of(rows)
        if self.own_ is not None:
            further, half = self.own_.residual(rows)
            residual = residual + further
        found = corrected(estimate, float(residual[0]), float(half[0]))
        return found if self.own_ is None else replace(found, relative_error=float(np.expm1(half[0])))

    def pricer(self, graph: TrainingGraph, topology: Topology) -> StepPricer:
        """Of the simulation below."""
        return self.base.pricer(graph, topology)

    def _rows(self, graph: TrainingGraph, programs: Sequence[StepProgram], topology: Topology) -> Floats:
        pricer = self.pricer(graph, topology)
        return np.array([self._row(p, pricer, pricer.estimate(p)) for p in programs])

    def _row(self, program: StepProgram, pricer: StepPricer, estimate: Estimate) -> Floats:
        found = features(program, estimate, pricer)
        return np.array([found[name] for name in self.correction.features])


def cost_model_for(
    optimizer: OptimizerCost = ADAMW,
    measured_s: NodeTimes | None = None,
    calibration: Calibration | None = None,
    trials: Callable[[str], Sequence[Lesson]] | None = None,
) -> CostModel:
    """The most that is known: the simulation, and its correction where that was learned from the same backend and the
    cluster was calibrated, as the lab was. `trials`: from a basis, what steps of this cluster that were priced on it
    have taught; then there is a correction in any case. Other arguments are those of `AnalyticCostModel`."""
    analytic = AnalyticCostModel(optimizer, measured_s, calibration=calibration)
    used = calibration.backend if calibration is not None else ""  # as in `cpu:gloo,cuda:nccl`
    learned = GLOO.name in used and NCCL.name not in used
    if trials is None:
        return CorrectedCostModel(analytic) if learned else analytic
    rests_on = "" if calibration is None else hashlib.sha256(calibration.model_dump_json().encode()).hexdigest()[:16]
    basis = "+".join(filter(None, [rests_on, "compute" if measured_s is not None else ""])) or "data sheets"
    model = CorrectedCostModel(analytic, basis=basis)
    if not learned:
        half = math.log1p(RELATIVE_ERROR["guessed"])
        plain = shipped().model_copy(update={"belief": 0.0, "inside": half, "outside": half})
        model = CorrectedCostModel(analytic, plain, UNCORRECTED, basis)
    return model.fit_lessons(trials(basis))


@cache
def shipped() -> Correction:
    """What was learned from the lab's trials, with gloo; read once."""
    return Correction.load(SHIPPED)


def corrected(estimate: Estimate, residual: float, half: float) -> Estimate:
    """An estimate, longer by the exponential of `residual`; compute keeps its time unless the step becomes shorter.
    `half` of the interval, in logarithms."""
    factor = float(np.exp(residual))
    step_s = factor * estimate.step_time_s
    compute_s = min(estimate.compute_s, step_s)
    return replace(
        estimate,
        step_time_s=step_s,
        compute_s=compute_s,
        exposed_communication_s=step_s - compute_s,
        communication_s=factor * estimate.communication_s,
        relative_error=float(np.expm1(half)) if estimate.provenance == "measured" else estimate.relative_error,
        spans=tuple(s._replace(start_s=factor * s.start_s, stop_s=factor * s.stop_s) for s in estimate.spans),
    )
