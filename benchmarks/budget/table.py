"""Outcomes as a table: a row for each method, a column for each task that choices are judged on."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.budget.hindsight import mean_of
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
    means = {t: mean_of(o.lost for o in outcomes if o.task == t) for t in tasks}
    worst = max(means, key=lambda t: means[t])
    over = sum(lost > LIMIT for lost in means.values())
    most = f"{100 * means[worst]:.1f}" if means[worst] < 1 else "everything"
    return f"{over} of {len(tasks)}, {most} ({worst})"
