"""AutoDist's published throughputs: five models on 1 to 32 T4, under five strategies. A choice is a model on a number
of GPUs; each model in turn is left out, and its strategies are chosen by what the others taught.

A step under a strategy is its compute, longer by the parameters over a bandwidth of the strategy's own, within a host
and between hosts. With servers, also by the largest variable, for which one of them waits alone, and by something for
each variable. These are fitted, none below 0. Per-GPU batches are not published: 32 pictures and 8 texts are assumed.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from scipy.optimize import nnls

from autopar.cost_models.correction import Floats
from benchmarks.fidelity.figures import Choices, grouped
from benchmarks.harness import Report, Target

SOURCE = Path(__file__).with_name("published") / "autodist_fig1_strategy_throughput_digitized.csv"
STRATEGIES = ("AllReduce", "PS", "PSLoadBalancing", "PartitionedPS", "Parallax")
SERVED = {"PS", "PSLoadBalancing", "PartitionedPS"}
PARAMETERS = {"InceptionV3": 23.9e6, "ResNet101": 44.7e6, "DenseNet121": 8.1e6, "VGG16": 138.4e6, "BERT-large": 340e6}
LARGEST = {"InceptionV3": 2.05e6, "ResNet101": 2.36e6, "DenseNet121": 1.02e6, "VGG16": 102.8e6, "BERT-large": 31.3e6}
VARIABLES = {"InceptionV3": 190, "ResNet101": 418, "DenseNet121": 364, "VGG16": 32, "BERT-large": 398}
"""Of keras.applications (keras.io/api/applications), and of BERT (Devlin et al., 2019): elements, of all and of the
largest, and how many are trained."""
BATCH = {"images/s/GPU": 32, "examples/s/GPU": 8}
GPUS_A_HOST = 4
LIMIT = 0.04


@dataclass(frozen=True)
class Measured:
    """One bar of the figure."""

    model: str
    gpus: int
    strategy: str
    seconds: float
    """A step."""
    alone_s: float
    """The quickest step of the model on one GPU."""

    @property
    def terms(self) -> tuple[float, ...]:
        """Of the step, in steps of one GPU: what it takes is the first, and up to a factor each of the others."""
        gigabytes, largest = (4 * n[self.model] / self.alone_s / 1e9 for n in (PARAMETERS, LARGEST))
        inside, hosts = min(self.gpus, GPUS_A_HOST), -(-self.gpus // GPUS_A_HOST)
        summed = 1.0, gigabytes * (1 - 1 / inside), gigabytes * (1 - 1 / hosts)
        if self.strategy not in SERVED:
            return summed
        return *summed, largest * (1 - 1 / hosts), VARIABLES[self.model] / self.alone_s / 1e4 * (hosts > 1)


def measured() -> list[Measured]:
    """All bars of the five strategies."""
    with SOURCE.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["strategy"] in STRATEGIES]
    seconds = [BATCH[r["unit"]] / float(r["throughput_per_gpu"]) for r in rows]
    alone: dict[str, float] = {}
    for row, took in zip(rows, seconds, strict=True):
        if row["gpus"] == "1":
            alone[row["model"]] = min(took, alone.get(row["model"], took))
    return [
        Measured(r["model"], int(r["gpus"]), r["strategy"], took, alone[r["model"]])
        for r, took in zip(rows, seconds, strict=True)
    ]


def fill(report: Report) -> None:
    """A row for each model left out, the best policy that is the same everywhere, and the target."""
    bars = measured()
    regrets: list[float] = []
    for model in PARAMETERS:
        known, left = [b for b in bars if b.model != model], [b for b in bars if b.model == model]
        sets = _choices(left, _predicted(known, left))
        mine = [s.regret() for s in sets]
        regrets += mine
        report.rows.append((f"AutoDist, {model}", "4 other models", "", "", "", f"{mean(mine):.1%}"))
    fixed = {s: _always(s, bars) for s in STRATEGIES}
    best = min(fixed, key=fixed.__getitem__)
    report.rows.append((f"AutoDist, always {best}", "", "", "", "", f"{fixed[best]:.1%}"))
    report.rows.append(("AutoDist, all", "4 other models", "", "", "", f"{mean(regrets):.1%}"))
    report.targets.append(Target("AutoDist's table, each model left out: mean regret", mean(regrets), LIMIT))


def _predicted(known: list[Measured], asked: list[Measured]) -> Floats:
    """Steps in seconds, by what each strategy was seen to add to others' steps."""
    found = np.zeros(len(asked))
    for strategy in STRATEGIES:
        seen = [b for b in known if b.strategy == strategy]
        ratio = np.array([b.seconds / b.alone_s for b in seen])
        weights = nnls(np.array([b.terms for b in seen]) / ratio[:, None], np.ones(len(seen)))[0]
        for i, bar in enumerate(asked):
            if bar.strategy == strategy:
                found[i] = bar.alone_s * float(np.dot(weights, bar.terms))
    return found


def _choices(bars: list[Measured], predicted: Floats) -> list[Choices]:
    truth = np.array([b.seconds for b in bars])
    return list(grouped(predicted, truth, [(b.model, b.gpus) for b in bars]).values())


def _always(strategy: str, bars: list[Measured]) -> float:
    """Mean regret of one strategy everywhere; where it was not measured, of the first that was."""
    return mean(c.regret() for c in _choices(bars, np.array([float(b.strategy != strategy) for b in bars])))
