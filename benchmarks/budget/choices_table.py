"""Choices as a table: a row for each cell, beside the best in hindsight and others' adaptive compression."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from autopar.spec.quality import percent
from benchmarks.budget.choices import Cell
from benchmarks.budget.hindsight import Best, best, mean_of, speeds
from benchmarks.budget.outcome import Outcome
from benchmarks.budget.rival_trainings import RivalOutcome
from benchmarks.harness import Report, Target

WORTH_IT = 1.3
"""Where the best in hindsight gains so much, a choice should not be exact."""
EXPOSED = 0.5
"""Part of the rounded plan's step that no compute hides, above which a choice should gain much."""


@dataclass(frozen=True)
class Judged:
    """The choices of one cell, with all seeds."""

    cells: Sequence[Cell]
    found: Best | None
    """The fastest method that kept the budget on other seeds."""

    @property
    def budget(self) -> float:
        return self.cells[0].budget

    @property
    def lost(self) -> float:
        """In the mean over seeds."""
        return mean_of(cell.lost for cell in self.cells)

    @property
    def error(self) -> float:
        """The standard error of `lost`: over seeds, or of one seed, as the test set is finite."""
        lost = [cell.lost for cell in self.cells if cell.lost is not None]
        return statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else self.cells[0].lost_error or 0.0

    @property
    def speed(self) -> float:
        return statistics.geometric_mean(cell.speed for cell in self.cells)

    @property
    def rounded_speed(self) -> float:
        return statistics.geometric_mean(cell.rounded_speed for cell in self.cells)

    @property
    def exposed(self) -> float:
        """Which part of the step no compute hides, under the plan that rounds."""
        return speeds(self.cells[0].task, self.cells[0].network).exposed

    @property
    def row(self) -> list[str]:
        first, found = self.cells[0], self.found
        bounds = [math.inf if cell.bound is None else cell.bound for cell in self.cells]
        over = self.lost > self.budget
        return [
            first.task,
            first.network,
            f"{self.budget:.1%}",
            ", ".join(sorted({cell.chosen for cell in self.cells})),
            f"{100 * self.lost:.2f} +- {100 * self.error:.2f}",
            percent(None if math.inf in bounds else max(bounds)),
            f"{self.speed:.2f}",
            f"{self.rounded_speed:.2f}",
            "" if found is None else f"{found.speed:.2f}, {found.method}",
            "yes" if not over else "within its error" if self.lost - self.error <= self.budget else "no",
        ]


def choices_report(
    cells: Iterable[Cell], outcomes: Iterable[Outcome] = (), rivals: Iterable[RivalOutcome] = ()
) -> Report:
    """What was chosen in each cell: the mean over seeds of what it lost and of its speed. `outcomes`: of trainings with
    each method, of which those of other seeds say which one was the best in hindsight. `rivals`: of
    trainings with others' adaptive compression."""
    known, trained, theirs = list(cells), list(outcomes), list(rivals)
    made = Report(
        "budget-choices",
        "What a quality budget chooses, and what that loses: % of what exact training gains",
        ["task", "network", "budget", "chosen", "lost", "bound", "speed", "rounded's speed", "in hindsight", "within"],
    )
    by_cell: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in known:
        by_cell.setdefault((cell.task, cell.network, cell.budget), []).append(cell)
    judged = []
    for of, seeds in by_cell.items():
        chosen_seeds = {cell.seed for cell in seeds}
        judged.append(Judged(seeds, best(*of, [o for o in trained if o.seed not in chosen_seeds])))
    made.rows = [one.row for one in judged]
    made.notes = [
        "Speeds are predicted, as those of the cluster's data sheet, over all steps, the exact ones at the beginning "
        "included: 1 is the fastest exact plan's. 'lost' is on a test set that the choice did not see."
    ]
    made.data = {"cells": [asdict(cell) for cell in known]}
    if known:
        _quality(made, judged, known)
        _speed(made, judged)
        for name in dict.fromkeys(r.rival for r in theirs):
            _beside(made, judged, name, [r for r in theirs if r.rival == name])
    return made


def _quality(made: Report, judged: Sequence[Judged], cells: Sequence[Cell]) -> None:
    """Whether budgets are kept and bounds hold, and what that took."""
    within = [one.lost <= one.budget for one in judged]
    far = [one for one in judged if one.lost - one.error > one.budget]
    holds: dict[tuple[str, int, str, float | None], bool] = {}
    covered = []
    for cell in cells:
        if cell.bound != 0.0:  # of what loses nothing, there is none
            covered.append(cell.lost is not None and (cell.bound is None or cell.lost <= cell.bound))
            key = cell.task, cell.seed, cell.chosen, cell.lost
            holds[key] = holds.get(key, True) and covered[-1]
    made.notes.append(
        f"{sum(within)} of {len(within)} cells keep their budget in the mean over seeds; the predicted bound covers "
        f"{sum(covered)} of {len(covered)} lossy choices, which are {len(holds)} trainings, of which it covers "
        f"{sum(holds.values())}."
    )
    probe_s = max(cell.probe_s or 0.0 for cell in cells)
    pilots = max(cell.pilot_part for cell in cells)
    made.targets += [
        Target("cells that lose more than their budget by a standard error", len(far), 0),
        Target("part of the cells that keep it in the mean", sum(within) / len(within), 0.95, "at least"),
        Target("part of the bounds that hold", sum(covered) / max(1, len(covered)), 0.95, "at least"),
        Target("plans and probes of a choice", probe_s, 60, unit="s"),
        Target("pilots, of the training's steps", pilots, 0.1),
    ]


def _speed(made: Report, judged: Sequence[Judged]) -> None:
    """How fast choices are beside the plan that rounds, and beside the best in hindsight."""
    gains = [one.speed / one.rounded_speed for one in judged]
    exposed = [one for one in judged if one.exposed > EXPOSED]
    gain = statistics.geometric_mean(one.speed / one.rounded_speed for one in exposed) if exposed else None
    words = (
        f"Over the fastest plan that rounds, choices gain {statistics.geometric_mean(gains):.2f} times in the "
        f"geometric mean, and {min(gains):.2f} at least"
    )
    if gain is not None:
        words += f"; {gain:.2f} where more than half of its step is exposed ({len(exposed)} cells)"
    made.notes.append(words + ".")
    found = [(one, one.found) for one in judged if one.found is not None]
    reached = statistics.geometric_mean(one.speed / b.speed for one, b in found) if found else None
    worth = [all(c.chosen == "exact" for c in one.cells) for one, b in found if b.speed >= WORTH_IT]
    if reached is not None:
        made.notes.append(
            f"In hindsight: the fastest method that kept the budget on other seeds, in {len(found)} cells; choices "
            f"reach {reached:.2f} of its speed in the geometric mean, and are exact in {sum(worth)} of the "
            f"{len(worth)} cells in which it gains {WORTH_IT} or more."
        )
    made.targets += [
        Target("speed, of the best in hindsight", reached, 0.85, "at least"),
        Target(f"exact, where hindsight gains {WORTH_IT}", sum(worth) if found else None, 0),
        Target("speed, of the rounded plan's, where half of its step is exposed", gain, 1.4, "at least"),
        Target("the least of these, anywhere", min(gains), 1.0, "at least"),
    ]


def _beside(made: Report, judged: Sequence[Judged], name: str, rivals: Sequence[RivalOutcome]) -> None:
    """How often a rival keeps the budget, and how much time choices take beside it where they lose no more; in the mean
    over the seeds of both."""
    by_training = {(r.task, r.seed): r for r in rivals}
    kept, times = list[bool](), list[float]()
    for one in judged:
        pairs = [(c, by_training[c.task, c.seed]) for c in one.cells if (c.task, c.seed) in by_training]
        if not pairs:
            continue
        lost, mine = mean_of(r.lost for _, r in pairs), mean_of(c.lost for c, _ in pairs)
        kept.append(lost <= one.budget)
        if mine <= max(lost, 0.0):
            times.append(statistics.geometric_mean(r.speeds[c.network] / c.speed for c, r in pairs))
    mean = statistics.geometric_mean(times) if times else None
    words = f"{name} keeps the budget in {sum(kept)} of {len(kept)} cells"
    if mean is not None:
        words += f"; in {len(times)} of these choices lose no more, and take {mean:.2f} of its time"
    made.notes.append(words + ".")
    made.targets.append(Target(f"time, of {name}'s at no greater loss", mean, 0.9))
