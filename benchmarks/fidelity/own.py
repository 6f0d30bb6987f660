"""What a few trials of a workload on a cluster make of the predictions of its other plans, behind a correction that has
seen neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

import numpy as np

from autopar.cost_models.own_trials import NOISE, NOISY, OwnTrials, most_telling
from benchmarks.fidelity.figures import Quality
from benchmarks.fidelity.lab import Said, Table, quality
from benchmarks.harness import Target
from benchmarks.trials.records import Dataset

OWN = 20
"""Trials of a new workload on a new cluster that a planner may spend, noisy ones among them."""
LEAST, LEAST_OTHERS, DRAWS = 40, 10, 20
"""Trials of a workload on a cluster, and those of them that are clean and left to predict, at least; and how often
those that are spent are drawn."""


@dataclass
class WithOwn:
    """Predictions and measurements of the trials that were not spent."""

    way: str
    """In which the trials to be spent are found."""
    predicted: list[float] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    draw: list[int] = field(default_factory=list)
    """Which one each was predicted for."""

    @property
    def cells(self) -> int:
        """Workloads on a cluster."""
        return len({(s.workload, s.cluster) for s in self.said})

    @property
    def quality(self) -> Quality:
        return quality(self.said, np.array(self.predicted), self.draw)

    @property
    def note(self) -> str:
        return (
            f"After {OWN} own trials, {self.way}: {self.cells} workloads on a cluster with {LEAST} trials or more; "
            f"the others are predicted that do not say they were noisy: {mean(self.inside):.0%} of them lie within the "
            "interval."
        )

    @property
    def targets(self) -> tuple[Target, ...]:
        found = self.quality
        return (
            Target(f"trials, after {OWN} own: MAPE", found.mape, 0.05),
            Target(f"trials, after {OWN} own: tau", found.tau, 0.93, "at least"),
            Target(f"trials, after {OWN} own: top-1 regret", found.regret, 0.015),
        )


def predict(said: Sequence[Said]) -> tuple[WithOwn, WithOwn]:
    """Of all cells that have trials enough, with those to be spent chosen by the model, or drawn; `said` holds noisy
    ones, too."""
    table = Table.of(said)
    rows, truth = table.rows, table.measured
    clean = np.array([not s.trial.noise for s in said])
    cells: dict[tuple[str, str], list[int]] = {}
    for i, s in enumerate(said):
        cells.setdefault((s.workload, s.cluster), []).append(i)
    chosen, drawn = WithOwn("chosen by the model"), WithOwn(f"drawn {DRAWS} times")
    draw = np.random.default_rng(0)
    for (workload, cluster), places in cells.items():
        at = np.array(places)
        if len(at) < LEAST or clean[at].sum() < LEAST_OTHERS:
            continue
        known = clean & [s.workload != workload and s.cluster != cluster for s in said]
        correction = table.learned(known)
        corrected = table.predicted * np.exp(correction.residual(rows))
        first = most_telling(correction, rows[at], OWN)
        orders = [(chosen, np.concatenate([at[first], np.delete(at, first)]))]
        orders += [(drawn, draw.permutation(at)) for _ in range(DRAWS)]
        for number, (found, order) in enumerate(orders):
            spent, others = order[:OWN], order[OWN:][clean[order[OWN:]]]
            noise = np.where(clean[spent], NOISE, NOISY)
            trials = OwnTrials.of(correction, rows[spent], np.log(truth[spent] / corrected[spent]), noise)
            off, half = trials.residual(rows[others])
            predicted = corrected[others] * np.exp(off)
            found.predicted += predicted.tolist()
            found.inside += (np.abs(np.log(truth[others] / predicted)) <= half).tolist()
            found.said += [said[i] for i in others]
            found.draw += [number] * len(others)
    return chosen, drawn


def apart(data: Dataset) -> list[float]:
    """How far a trial and a repeat of it are apart, in logarithms, where neither says that it was noisy."""
    times = [[t.step_time_s for t in again if t.ok and not t.noise] for again in data.repeats().values()]
    return [float(np.log(b / a)) for some in times for a, b in pairwise(some)]
