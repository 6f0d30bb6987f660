"""The analytic cost model, corrected by what was learned from measured steps: the lab's, and a cluster's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np

from autopar.backends.gloo import GLOO
from autopar.backends.nccl import NCCL
from autopar.cost_models.analytic import AnalyticCostModel, NodeTimes, StepPricer
from autopar.cost_models.base import CostModel, Estimate, Observation
from autopar.cost_models.correction import Correction, Floats
from autopar.cost_models.features import features
from autopar.cost_models.optimizers import ADAMW, OptimizerCost
from autopar.cost_models.own_trials import NOISE, NOISY, OwnTrials, most_telling
from autopar.ir.training_graph import TrainingGraph
from autopar.spec.calibration import Calibration
from autopar.spec.topology import Topology
from autopar.strategies.lowering import StepProgram

SHIPPED = Path(__file__).parent / "learned" / "gloo.json"


class CorrectedCostModel(CostModel):
    """Multiplies the simulated step time by a factor from the plan's physical features, and says how sure it is.

    `correction` was learned from other models on other clusters; by default, what is shipped (see
    `cost_models/learned/README.md`). `fit` takes steps of this cluster: twenty plans of one model tell the next ones of
    it apart. Where a prediction rests on measured figures alone, its interval is the learned one.
    """

    def __init__(self, base: AnalyticCostModel, correction: Correction | None = None) -> None:
        self.base = base
        self.correction = correction or shipped()
        self.own_: OwnTrials | None = None

    def fit(self, observations: Sequence[Observation]) -> Self:
        """Learns how far its predictions are off on these; what it had learned from others before is forgotten."""
        self.own_ = None
        if observations:
            pricers = [self.pricer(o.graph, o.topology) for o in observations]
            estimates = [pricer.estimate(o.program) for pricer, o in zip(pricers, observations, strict=True)]
            rows = np.array(
                [self._row(o.program, p, e) for o, p, e in zip(observations, pricers, estimates, strict=True)]
            )
            predicted_s = np.array([e.step_time_s for e in estimates]) * np.exp(self.correction.residual(rows))
            off = np.log(np.array([o.step_time_s for o in observations]) / predicted_s)
            noise = np.where([o.disturbed for o in observations], NOISY, NOISE)
            self.own_ = OwnTrials.of(self.correction, rows, off, noise)
        return self

    def most_telling(
        self, graph: TrainingGraph, programs: Sequence[StepProgram], topology: Topology, count: int
    ) -> list[int]:
        """Which of these programs to measure for `fit`, to learn most about all of them: their places, the most telling
        first."""
        pricer = self.pricer(graph, topology)
        rows = np.array([self._row(p, pricer, pricer.estimate(p)) for p in programs])
        return most_telling(self.correction, rows, count)

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
        return corrected(estimate, float(residual[0]), float(half[0]))

    def pricer(self, graph: TrainingGraph, topology: Topology) -> StepPricer:
        """Of the simulation below."""
        return self.base.pricer(graph, topology)

    def _row(self, program: StepProgram, pricer: StepPricer, estimate: Estimate) -> Floats:
        found = features(program, estimate, pricer)
        return np.array([found[name] for name in self.correction.features])


def cost_model_for(
    optimizer: OptimizerCost = ADAMW, measured_s: NodeTimes | None = None, calibration: Calibration | None = None
) -> CostModel:
    """The most that is known: the simulation, and its correction where that was learned from the same backend and the
    cluster was calibrated, as the lab was. Arguments are those of `AnalyticCostModel`."""
    analytic = AnalyticCostModel(optimizer, measured_s, calibration=calibration)
    used = calibration.backend if calibration is not None else ""  # as in `cpu:gloo,cuda:nccl`
    learned = GLOO.name in used and NCCL.name not in used
    return CorrectedCostModel(analytic) if learned else analytic


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
