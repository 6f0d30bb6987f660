"""Choices as a table: a row for each cell, beside the best in hindsight and others' adaptive compression."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from autopar.spec.quality import percent
from benchmarks.budget.choices import Cell
from benchmarks.budget.hindsight import best, mean_of, speeds
from benchmarks.budget.outcome import Outcome
from benchmarks.budget.rival_trainings import RivalOutcome
from benchmarks.harness import Report

WORTH_IT = 1.3
"""Where the best in hindsight gains so much, a choice should not be exact."""


def choices_report(
    cells: Iterable[Cell], outcomes: Iterable[Outcome] = (), rivals: Iterable[RivalOutcome] = ()
) -> Report:
    """What was chosen in each cell: the mean over seeds of what it lost and of its speed. `outcomes`: of trainings with
    each method, of which those of other seeds say which one was the best in hindsight. `rivals`: of
    trainings with others' adaptive compression."""
    known, trained = list(cells), list(outcomes)
    made = Report(
        "budget-choices",
        "What a quality budget chooses, and what that loses: % of what exact training gains",
        ["task", "network", "budget", "chosen", "lost", "bound", "speed", "rounded's speed", "in hindsight", "within"],
    )
    by_cell: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in known:
        by_cell.setdefault((cell.task, cell.network, cell.budget), []).append(cell)
    within = []
    beside = list[Beside]()
    for (task, network, budget), seeds in by_cell.items():
        lost = [cell.lost for cell in seeds if cell.lost is not None]
        mean = statistics.fmean(lost) if len(lost) == len(seeds) else math.inf
        over_seeds = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else seeds[0].lost_error or 0.0
        within.append(mean <= budget)
        chosen_seeds = {cell.seed for cell in seeds}
        found = best(task, network, budget, [o for o in trained if o.seed not in chosen_seeds])
        speed, rounded_speed = (
            statistics.geometric_mean(of) for of in zip(*((c.speed, c.rounded_speed) for c in seeds), strict=True)
        )
        if found is not None:
            is_exact = all(cell.chosen == "exact" for cell in seeds)
            beside.append(Beside(speed, rounded_speed, found.speed, speeds(task, network).exposed, is_exact))
        made.rows.append(
            [
                task,
                network,
                f"{budget:.1%}",
                ", ".join(sorted({cell.chosen for cell in seeds})),
                f"{100 * mean:.2f} +- {100 * over_seeds:.2f}",
                percent(max((cell.bound for cell in seeds), key=lambda b: math.inf if b is None else b)),
                f"{speed:.2f}",
                f"{rounded_speed:.2f}",
                "" if found is None else f"{found.speed:.2f}, {found.method}",
                "yes" if mean <= budget else "within its error" if mean - over_seeds <= budget else "no",
            ]
        )
    gains = [cell.speed / cell.rounded_speed for cell in known]
    made.notes = [
        "Speeds are predicted, as those of the cluster's data sheet, over all steps, the exact ones at the beginning "
        "included: 1 is the fastest exact plan's. 'lost' is on a test set that the choice did not see."
    ]
    if known:
        covered = [cell.lost is not None and cell.lost <= c_bound for cell in known if (c_bound := cell.bound)]
        made.notes.append(
            f"{sum(within)} of {len(within)} cells keep their budget in the mean over seeds; over the fastest plan "
            f"that rounds, choices gain {statistics.geometric_mean(gains):.2f} times in the geometric mean"
            + (f"; the predicted bound covers {sum(covered)} of {len(covered)} lossy choices." if covered else ".")
        )
    if beside:
        made.notes.append(_in_hindsight(beside))
    made.notes += _beside_rivals(known, list(rivals))
    made.data = {"cells": [asdict(cell) for cell in known]}
    return made


def _beside_rivals(cells: list[Cell], rivals: list[RivalOutcome]) -> list[str]:
    """A sentence for each rival: how often it keeps the budget, and how much time choices take beside it where they
    lose no more."""
    notes = []
    for name in dict.fromkeys(r.rival for r in rivals):
        kept, times = list[bool](), list[float]()
        for cell in cells:
            each = [r for r in rivals if (r.rival, r.task) == (name, cell.task)]
            if each:
                lost = mean_of(r.lost for r in each)
                kept.append(lost <= cell.budget)
                if cell.lost is not None and cell.lost <= max(lost, 0.0):
                    times.append(statistics.geometric_mean(r.speeds[cell.network] for r in each) / cell.speed)
        words = f"{name} keeps the budget in {sum(kept)} of {len(kept)} cells"
        if times:
            mean = statistics.geometric_mean(times)
            words += f"; in {len(times)} of them choices lose no more, and take {mean:.2f} of its time"
        notes.append(words + ".")
    return notes


@dataclass(frozen=True)
class Beside:
    """A cell's choice beside the fastest method that kept the budget on other seeds."""

    speed: float
    rounded_speed: float
    hindsight_speed: float
    exposed: float
    """Which part of the step no compute hides, under the plan that rounds."""
    is_exact: bool
    """Whether nothing that loses was chosen."""


def _in_hindsight(beside: list[Beside]) -> str:
    reached = statistics.geometric_mean(b.speed / b.hindsight_speed for b in beside)
    worth = [b for b in beside if b.hindsight_speed >= WORTH_IT]
    words = (
        f"In hindsight: the fastest method that kept the budget on other seeds, in {len(beside)} cells; choices reach "
        f"{reached:.2f} of its speed in the geometric mean, and are exact in {sum(b.is_exact for b in worth)} of the "
        f"{len(worth)} cells in which it gains {WORTH_IT} or more."
    )
    if exposed := [b for b in beside if b.exposed > 0.5]:
        gain = statistics.geometric_mean(b.speed / b.rounded_speed for b in exposed)
        most = statistics.geometric_mean(b.hindsight_speed / b.rounded_speed for b in exposed)
        words += (
            f" Where more than half of the rounded plan's step is exposed ({len(exposed)} cells), choices gain "
            f"{gain:.2f} times over it, the best in hindsight {most:.2f} times."
        )
    return words
