"""1,440 measured GPT training times (vTrain's table): one node of 2 to 8 A100; tensor, data, pipeline parallelism.

An analytic model, a sum of physical terms with weights above 0 that are fitted to 100 of the points, and the learned
correction on top. A choice is a model, a global batch and a number of GPUs; those of the test were not seen.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from scipy.optimize import nnls

from autopar.cost_models.correction import Floats
from autopar.cost_models.learning import learn
from benchmarks.fidelity.figures import Quality
from benchmarks.harness import Report, Target

SOURCE = Path(__file__).with_name("published") / "vtrain_ground_truth_single.csv"
TRAINING, SEEDS = 100, tuple(range(8))
MAPE_LIMIT, REGRET_LIMIT = 0.06, 0.03
VOCABULARY = 51_200
"""Of Megatron's GPT."""


@dataclass(frozen=True)
class Run:
    """One measured configuration."""

    seconds: float
    gpus: int
    batch: int
    micro: int
    hidden: int
    heads: int
    layers: int
    length: int
    tensor: int
    data: int
    pipeline: int

    @property
    def choice(self) -> tuple[int, ...]:
        return (self.gpus, self.batch, self.hidden, self.heads, self.layers, self.length)

    @property
    def slots(self) -> float:
        """Micro-batches that pass a stage one behind the other, and those that it waits for."""
        return self.batch / (self.data * self.micro) + self.pipeline - 1

    @property
    def terms(self) -> dict[str, float]:
        """What takes time, each up to a factor: operations, bytes, launches, messages."""
        tokens, h = self.micro * self.length, self.hidden
        depth = self.layers / self.pipeline
        weights = 12 * h * h * depth / self.tensor
        table = VOCABULARY * h / self.tensor
        ring = 2 * (self.tensor - 1) / self.tensor
        return {
            "products": self.slots * depth * 24 * tokens * h * h / self.tensor,
            "attention": self.slots * depth * 4 * tokens * self.length * h / self.tensor,
            "vocabulary": self.slots * 2 * tokens * table,
            "activations": self.slots * depth * tokens * h,
            "scores": self.slots * depth * self.micro * self.heads * self.length**2 / self.tensor,
            "launches": self.slots * depth,
            "tensor bytes": self.slots * depth * tokens * h * ring,
            "tensor messages": self.slots * depth * (self.tensor > 1),
            "stage bytes": self.slots * tokens * h * (self.pipeline > 1),
            "data bytes": (weights + table) * 2 * (self.data - 1) / self.data,
            "update": weights + table,
            "fixed": 1.0,
        }


def measured() -> list[Run]:
    """All of them."""
    with SOURCE.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [Run(float(row[10]) / 1e3, *map(int, row[:10])) for row in rows]


def fill(report: Report) -> None:
    """A row for the analytic model and one for the corrected one, means over the draws of the training points."""
    runs = measured()
    terms = np.array([list(r.terms.values()) for r in runs])
    names = tuple(runs[0].terms)
    truth = np.array([r.seconds for r in runs])
    choices = [r.choice for r in runs]
    found: dict[str, list[Quality]] = {"analytic": [], "corrected": []}
    for seed in SEEDS:
        known, rest = _divided(choices, seed)
        weights = nnls(terms[known] / truth[known, None], np.ones(len(known)))[0]
        plain = terms @ weights
        rows = _features(terms * weights, runs)
        correction = learn(
            (*names, *_CONFIGURATION), rows[known], plain[known], truth[known], [choices[i] for i in known], seed
        )
        corrected = plain * np.exp(correction.residual(rows))
        of_rest = [choices[i] for i in rest]
        found["analytic"].append(Quality.of(plain[rest], truth[rest], of_rest))
        found["corrected"].append(Quality.of(corrected[rest], truth[rest], of_rest))
    for name, qualities in found.items():
        mape, p95 = (mean(getattr(q, figure) for q in qualities) for figure in ("mape", "p95"))
        tau, regret = (mean(getattr(q, figure) or 0.0 for q in qualities) for figure in ("tau", "regret"))
        shown = f"{mape:.1%}", f"{p95:.1%}", f"{tau:.3f}", f"{regret:.1%}"
        report.rows.append((f"vTrain, {name}", f"{TRAINING} points", *shown))
    report.targets += [
        Target("vTrain table: MAPE, choices not seen", mape, MAPE_LIMIT),
        Target("vTrain table: top-1 regret, choices not seen", regret, REGRET_LIMIT),
    ]


_CONFIGURATION = ("slots", "micro", "tensor", "data", "pipeline", "tokens", "width")


def _features(parts: Floats, runs: list[Run]) -> Floats:
    """Of what the analytic model says, the part of each term; and the configuration, in logarithms."""
    shares = parts / parts.sum(1, keepdims=True)
    configuration = [
        (r.slots, r.micro, r.tensor, r.data, r.pipeline, r.micro * r.length, r.hidden / r.tensor) for r in runs
    ]
    return np.concatenate([shares, np.log2(np.array(configuration, dtype=float))], axis=1)


def _divided(choices: list[tuple[int, ...]], seed: int) -> tuple[list[int], list[int]]:
    """Training points, of half of the choices, and all points of the other half."""
    draw = np.random.default_rng(seed)
    names = sorted(set(choices))
    seen = {names[i] for i in draw.permutation(len(names))[: len(names) // 2]}
    inside = [i for i, c in enumerate(choices) if c in seen]
    known = [inside[i] for i in draw.permutation(len(inside))[:TRAINING]]
    return known, [i for i, c in enumerate(choices) if c not in seen]
