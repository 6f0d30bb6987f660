"""Outcomes as a table: a row for each method, a column for each task that choices are judged on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict

from autopar.spec.quality import percent
from benchmarks.budget.choices import Cell
from benchmarks.budget.methods import METHODS
from benchmarks.budget.outcome import Outcome
from benchmarks.budget.tasks import JUDGED, LEARNED, TASKS
from benchmarks.harness import Report

LIMIT = 0.01
"""What counts as lost in the column of the tasks that are learned from."""


def report(outcomes: Iterable[Outcome]) -> Report:
    """What each method lost on each task: the mean over seeds, and its standard error where there are several."""
    known = list(outcomes)
    shown = [t for t in JUDGED if any(o.task == t for o in known)]
    made = Report(
        "budget",
        "What each method of synchronization loses in quality, % of what exact training gains",
        ["method", *(f"{t} ({TASKS[t].ranks} ranks)" for t in shown), f"small tasks over {LIMIT:.0%}, worst"],
    )
    for method in METHODS:
        of = [o for o in known if o.method == method]
        if of:
            cells = [_cell([o for o in of if o.task == t]) for t in shown]
            made.rows.append([method, *cells, _small([o for o in of if o.task in LEARNED])])
    made.notes = [
        "The same weights, batches and schedule for all methods; learning rates are tuned for exact training alone. "
        "100 % is what exact training gains over the best prediction that looks at no input, in the task's metric "
        "on samples that were not trained on; below 0 a method did better than exact training. Behind +-, the standard "
        "error over seeds, or of one seed's test set.",
        "'exact, other batches' is exact training from the same weights on other batches: what chance alone makes of "
        "it. Compressed methods begin behind a tenth of the steps, as torch's manual advises for PowerSGD; 8 bits "
        "with the first step, and so do 4 bits under SGD.",
        *(f"{t}: {TASKS[t].about}, {TASKS[t].steps} steps, metric: {TASKS[t].metric.name}." for t in shown),
    ]
    made.data = {"outcomes": len(known)}
    return made


def choices_report(cells: Iterable[Cell]) -> Report:
    """What was chosen in each cell: the mean over seeds of what it lost and of its speed."""
    known = list(cells)
    made = Report(
        "budget-choices",
        "What a quality budget chooses, and what that loses: % of what exact training gains",
        ["task", "network", "budget", "chosen", "lost", "bound", "speed", "rounded's speed", "within"],
    )
    by_cell: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in known:
        by_cell.setdefault((cell.task, cell.network, cell.budget), []).append(cell)
    within = []
    for (task, network, budget), seeds in by_cell.items():
        lost = [cell.lost for cell in seeds if cell.lost is not None]
        mean = statistics.fmean(lost) if len(lost) == len(seeds) else math.inf
        over_seeds = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else seeds[0].lost_error or 0.0
        within.append(mean <= budget)
        made.rows.append(
            [
                task,
                network,
                f"{budget:.1%}",
                ", ".join(sorted({cell.chosen for cell in seeds})),
                f"{100 * mean:.2f} +- {100 * over_seeds:.2f}",
                percent(max((cell.bound for cell in seeds), key=lambda b: math.inf if b is None else b)),
                f"{statistics.geometric_mean(cell.speed for cell in seeds):.2f}",
                f"{statistics.geometric_mean(cell.rounded_speed for cell in seeds):.2f}",
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
    made.data = {"cells": [asdict(cell) for cell in known]}
    return made


def _cell(outcomes: list[Outcome]) -> str:
    if not outcomes:
        return ""
    lost = [o.lost for o in outcomes]
    if any(one is None for one in lost):
        return "diverged"
    known = [one for one in lost if one is not None]
    error = statistics.stdev(known) / len(known) ** 0.5 if len(known) > 1 else outcomes[0].lost_error or 0.0
    return f"{100 * statistics.fmean(known):.2f} +- {100 * error:.2f}"


def _small(outcomes: list[Outcome]) -> str:
    """How many of the small tasks lose more than `LIMIT`, of how many, and the most that one loses."""
    if not outcomes:
        return ""
    tasks = {o.task for o in outcomes}
    means = {t: _mean([o.lost for o in outcomes if o.task == t]) for t in tasks}
    worst = max(means, key=lambda t: means[t])
    over = sum(lost > LIMIT for lost in means.values())
    most = f"{100 * means[worst]:.1f}" if means[worst] < 1 else "everything"
    return f"{over} of {len(tasks)}, {most} ({worst})"


def _mean(lost: list[float | None]) -> float:
    return statistics.fmean(float("inf") if one is None else one for one in lost)
