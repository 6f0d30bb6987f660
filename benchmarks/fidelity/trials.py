"""The lab's own trials: predicted without any of them, with the learned correction from others, and with a few of the
cluster's own. What is tested was not learned from: workloads, clusters, or both at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import mean

import numpy as np
import numpy.typing as npt

from autopar.cost_models.correction import Floats
from autopar.cost_models.learning import COVERAGE, learn
from autopar.cost_models.own_trials import OwnTrials
from benchmarks.fidelity.baselines import METHODS
from benchmarks.fidelity.figures import Quality
from benchmarks.fidelity.lab import Lab, Said
from benchmarks.harness import Report, Target
from benchmarks.trials.card import folds
from benchmarks.trials.records import Dataset

OWN = 20
"""Trials of a new workload on a new cluster that a planner may spend."""
LEAST_OTHERS, DRAWS = 10, 4
"""Trials that are left to predict, at least; and how often those that are spent are drawn."""


def fill(report: Report) -> None:
    """Rows for each split, and the targets. Of trials that were repeated, all count; noisy ones do not."""
    data = Dataset.load()
    lab = Lab(data)
    said = [lab.say(t) for t in data.trials if t.ok and not t.noise and t.compute == "virtual"]
    if not said:
        report.notes.append("No trials were collected yet: `python -m benchmarks.trials collect`.")
        report.targets.append(Target("trials: number", 0, 1, "at least"))
        return
    names = tuple(said[0].features)
    rows = np.array([[s.features[n] for n in names] for s in said])
    plain = np.array([s.predicted_s for s in said])
    truth = np.array([s.trial.step_time_s for s in said])
    choices = [s.choice for s in said]
    _row(report, "simulated, nothing learned", Quality.of(plain, truth, choices))
    sizes = [len(plans) for plans in _by_choice(said).values() if len(plans) > 1]
    report.notes.append(
        f"{len(said)} trials with virtual compute that do not say they were noisy; order and regret are within "
        f"{len(sizes)} choices of {mean(sizes):.1f} plans each, on average."
    )
    _compare(report, names, rows, truth, said)
    both: Quality | None = None
    for name, split in SPLITS.items():
        corrected, covered = _left_out(names, rows, plain, truth, said, split)
        at = ~np.isnan(corrected)
        both = Quality.of(corrected[at], truth[at], [c for c, kept in zip(choices, at, strict=True) if kept])
        _row(report, f"{name} not seen", both)
        report.notes.append(f"{name} not seen: {covered:.0%} lie within the interval, which says {COVERAGE:.0%}.")
    assert both is not None
    report.targets += [
        Target("trials, model and cluster not seen: MAPE", both.mape, 0.10),
        Target("trials, model and cluster not seen: tau", both.tau, 0.85, "at least"),
        Target("trials, model and cluster not seen: top-1 regret", both.regret, 0.04),
    ]
    _with_own(report, names, rows, plain, truth, said)
    _noise_floor(report, data, truth, choices)


def _compare(report: Report, names: Sequence[str], rows: Floats, truth: Floats, said: Sequence[Said]) -> None:
    """Rows for what others do: nothing learned, or learned without the workload and the cluster."""
    choices = [s.choice for s in said]
    _row(report, "alpha-beta, nothing hidden", Quality.of(np.array([s.serial_s for s in said]), truth, choices))
    always = [
        found[0] / min(t for t, _ in plans) - 1
        for plans in _by_choice(said).values()
        if len(plans) > 1 and (found := [t for t, plan in plans if plan == "ddp"])
    ]
    if always:
        report.rows.append(("trials", f"always DDP ({len(always)} choices)", "", "", "", f"{mean(always):.1%}"))
    for name, (method, is_time) in METHODS.items():
        predicted = np.full(len(said), np.nan)
        for known, tested in _parts(_both, said):
            families = [c for c, kept in zip(choices, known, strict=True) if kept]
            predicted[tested] = method(names, rows[known], truth[known], families)(rows[tested])
        at = ~np.isnan(predicted)
        quality = Quality.of(predicted[at], truth[at], [c for c, kept in zip(choices, at, strict=True) if kept])
        _row(report, name, quality, is_time)


def _by_choice(said: Sequence[Said]) -> dict[object, list[tuple[float, str]]]:
    found: dict[object, list[tuple[float, str]]] = {}
    for s in said:
        found.setdefault(s.choice, []).append((s.trial.step_time_s, s.trial.plan))
    return found


Split = Callable[[Sequence[Said]], Iterable[tuple[list[bool], list[bool]]]]
"""Makes, from trials, pairs of which to learn from and which to test on."""


def _workloads(said: Sequence[Said]) -> Iterable[tuple[list[bool], list[bool]]]:
    for part in folds(s.workload for s in said):
        yield [s.workload not in part for s in said], [s.workload in part for s in said]


def _clusters(said: Sequence[Said]) -> Iterable[tuple[list[bool], list[bool]]]:
    for part in folds(s.cluster for s in said):
        yield [s.cluster not in part for s in said], [s.cluster in part for s in said]


def _both(said: Sequence[Said]) -> Iterable[tuple[list[bool], list[bool]]]:
    for known, tested in _workloads(said):
        for others, here in _clusters(said):
            yield (
                [a and b for a, b in zip(known, others, strict=True)],
                [a and b for a, b in zip(tested, here, strict=True)],
            )


SPLITS: dict[str, Split] = {"workload": _workloads, "cluster": _clusters, "workload and cluster": _both}


def _parts(split: Split, said: Sequence[Said]) -> Iterable[tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
    """What to learn from and what to test on, where there is something to test."""
    for known, tested in split(said):
        if any(tested):
            yield np.array(known), np.array(tested)


def _left_out(
    names: Sequence[str], rows: Floats, plain: Floats, truth: Floats, said: Sequence[Said], split: Split
) -> tuple[Floats, float]:
    """Each trial's time, corrected by what was learned without it; and which part lies within the interval."""
    corrected, inside = np.full(len(said), np.nan), np.zeros(len(said), bool)
    for known, tested in _parts(split, said):
        families = [(s.workload, s.cluster) for s, kept in zip(said, known, strict=True) if kept]
        correction = learn(names, rows[known], plain[known], truth[known], families)
        corrected[tested] = plain[tested] * np.exp(correction.residual(rows[tested]))
        off = np.abs(np.log(truth[tested] / corrected[tested]))
        inside[tested] = off <= correction.interval(rows[tested])
    return corrected, float(inside[~np.isnan(corrected)].mean())


def _with_own(
    report: Report, names: Sequence[str], rows: Floats, plain: Floats, truth: Floats, said: Sequence[Said]
) -> None:
    """A row, and targets: what some of a cell's own trials make of the others of it, behind a correction that has seen
    neither its workload nor its cluster."""
    cells: dict[tuple[str, str], list[int]] = {}
    for i, s in enumerate(said):
        cells.setdefault((s.workload, s.cluster), []).append(i)
    deep = {cell: np.array(at) for cell, at in cells.items() if len(at) >= OWN + LEAST_OTHERS}
    draw = np.random.default_rng(0)
    predicted: list[float] = []
    inside: list[bool] = []
    measured: list[float] = []
    choices: list[object] = []
    for (workload, cluster), at in deep.items():
        known = np.array([s.workload != workload and s.cluster != cluster for s in said])
        families = [(s.workload, s.cluster) for s, kept in zip(said, known, strict=True) if kept]
        correction = learn(names, rows[known], plain[known], truth[known], families)
        corrected = plain * np.exp(correction.residual(rows))
        for number in range(DRAWS):
            mixed = draw.permutation(at)
            own, others = mixed[:OWN], mixed[OWN:]
            trials = OwnTrials.of(correction, rows[own], np.log(truth[own] / corrected[own]))
            off, half = trials.residual(rows[others])
            found = corrected[others] * np.exp(off)
            predicted += found.tolist()
            measured += truth[others].tolist()
            inside += (np.abs(np.log(truth[others] / found)) <= half).tolist()
            choices += [(number, *said[i].choice) for i in others]
    if not deep:
        return
    quality = Quality.of(np.array(predicted), np.array(measured), choices)
    _row(report, f"the same after {OWN} own trials", quality)
    report.notes.append(
        f"After {OWN} own trials: {len(deep)} workloads on a cluster with {OWN + LEAST_OTHERS} clean trials or more, "
        f"each drawn {DRAWS} times; the others of it are predicted, {mean(inside):.0%} of them lie within the interval."
    )
    report.targets += [
        Target(f"trials, after {OWN} own: MAPE", quality.mape, 0.05),
        Target(f"trials, after {OWN} own: tau", quality.tau, 0.93, "at least"),
        Target(f"trials, after {OWN} own: top-1 regret", quality.regret, 0.015),
    ]


def _noise_floor(report: Report, data: Dataset, truth: Floats, choices: Sequence[object]) -> None:
    """A row: what a prediction would reach that is a second measurement."""
    times = [[t.step_time_s for t in again if t.ok and not t.noise] for again in data.repeats().values()]
    apart = [np.log(b / a) for some in times for a, b in pairwise(some)]
    if apart:
        again = truth * np.exp(np.random.default_rng(0).choice(apart, len(truth)))
        _row(report, f"measured again (noise floor, from {len(apart)} repeats)", Quality.of(again, truth, choices))


def _row(report: Report, name: str, quality: Quality, is_time: bool = True) -> None:
    errors = (f"{quality.mape:.1%}", f"{quality.p95:.1%}") if is_time else ("", "")
    order = ((quality.tau, ".3f"), (quality.regret, ".1%"), (quality.worst_regret, ".1%"), (quality.regret_of_3, ".1%"))
    shown = ["" if x is None else f"{x:{form}}" for x, form in (*order, (quality.pairs, ".1%"))]
    report.rows.append(("trials", name, *errors, *shown, f"{quality.bias:+.1%}" if is_time else ""))
