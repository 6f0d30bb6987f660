"""The lab's own trials: predicted without any of them, with the learned correction from others, and with a few of the
cluster's own. What is tested was not learned from: workloads, clusters, or both at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median

import numpy as np
import numpy.typing as npt

from autopar.cost_models.correction import Floats
from autopar.cost_models.learning import COVERAGE
from benchmarks.fidelity import own
from benchmarks.fidelity.baselines import METHODS
from benchmarks.fidelity.figures import ORDERED, Quality
from benchmarks.fidelity.lab import Lab, Said, Table, quality
from benchmarks.harness import Report, Target
from benchmarks.trials.card import folds
from benchmarks.trials.records import ALWAYS, Dataset


def fill(report: Report) -> None:
    """Rows for each split, and the targets. Of trials that were repeated, all count; noisy ones do not."""
    data = Dataset.load()
    lab = Lab(data)
    every = [lab.say(t) for t in data.trials if t.ok and t.compute == "virtual"]
    said = [s for s in every if not s.trial.noise]
    if not said:
        report.notes.append("No trials were collected yet: `python -m benchmarks.trials collect`.")
        report.targets.append(Target("trials: number", 0, 1, "at least"))
        return
    table = Table.of(said)
    _row(report, "simulated, nothing learned", quality(said, table.predicted))
    sizes = [len(plans) for plans in _by_choice(said).values() if len(plans) > 1]
    ordered = [size for size in sizes if size >= ORDERED]
    report.notes.append(
        f"{len(said)} trials with virtual compute that do not say they were noisy. Regret is within {len(sizes)} "
        f"choices of {mean(sizes):.1f} plans each, on average; tau within {len(ordered)}, of {ORDERED} plans or more, "
        f"{mean(ordered):.1f} on average. A plan that was run several times is one, with its median."
    )
    _compare(report, table, said)
    both: Quality | None = None
    for name, split in SPLITS.items():
        corrected, covered = _left_out(table, said, split)
        both = quality(said, corrected)
        _row(report, f"{name} not seen", both)
        report.notes.append(f"{name} not seen: {covered:.0%} lie within the interval, which says {COVERAGE:.0%}.")
    assert both is not None
    report.targets += [
        Target("trials, model and cluster not seen: MAPE", both.mape, 0.10),
        Target("trials, model and cluster not seen: tau", both.tau, 0.85, "at least"),
        Target("trials, model and cluster not seen: top-1 regret", both.regret, 0.04),
    ]
    apart = own.apart(data)
    if apart:
        _row(report, f"measured again (noise floor, from {len(apart)} repeats)", quality(said, again(said, apart)))
    chosen, drawn = own.predict(every)
    if drawn.cells:
        for with_own in (chosen, drawn):
            _row(report, f"the same after {own.OWN} own trials, {with_own.way}", with_own.quality)
            _row(report, "of these, measured again", quality(with_own.said, again(with_own.said, apart), with_own.draw))
            report.notes.append(with_own.note)
        report.targets += drawn.targets


def _compare(report: Report, table: Table, said: Sequence[Said]) -> None:
    """Rows for what others do: nothing learned, or learned without the workload and the cluster."""
    choices, rows, truth = [s.choice for s in said], table.rows, table.measured
    _row(report, "alpha-beta, nothing hidden", quality(said, np.array([s.serial_s for s in said])))
    always = [
        median(found) / min(median(s.trial.step_time_s for s in of) for of in plans.values()) - 1
        for plans in _by_choice(said).values()
        if len(plans) > 1
        and (found := [s.trial.step_time_s for of in plans.values() for s in of if s.trial.plan == ALWAYS])
    ]
    if always:
        report.rows.append(("trials", f"always DDP ({len(always)} choices)", "", "", "", f"{mean(always):.1%}"))
    for name, (method, is_time) in METHODS.items():
        predicted = np.full(len(said), np.nan)
        for known, tested in _parts(_both, said):
            families = [c for c, kept in zip(choices, known, strict=True) if kept]
            predicted[tested] = method(table.names, rows[known], truth[known], families)(rows[tested])
        _row(report, name, quality(said, predicted), is_time)


def _by_choice(said: Sequence[Said]) -> dict[object, dict[str, list[Said]]]:
    """What is said of each plan of each choice, every time that it was run."""
    found: dict[object, dict[str, list[Said]]] = {}
    for s in said:
        found.setdefault(s.choice, {}).setdefault(s.trial.key, []).append(s)
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


def _left_out(table: Table, said: Sequence[Said], split: Split) -> tuple[Floats, float]:
    """Each trial's time, corrected by what was learned without it; and which part lies within the interval."""
    corrected, inside = np.full(len(said), np.nan), np.zeros(len(said), bool)
    for known, tested in _parts(split, said):
        residual, half = table.learned(known).of(table.rows[tested])
        corrected[tested] = table.predicted[tested] * np.exp(residual)
        inside[tested] = np.abs(np.log(table.measured[tested] / corrected[tested])) <= half
    return corrected, float(inside[~np.isnan(corrected)].mean())


def again(said: Sequence[Said], apart: Sequence[float]) -> Floats:
    """A second measurement of these trials, in place of a prediction: none can be expected to be better."""
    truth = np.array([s.trial.step_time_s for s in said])
    return np.asarray(truth * np.exp(np.random.default_rng(0).choice(apart, len(truth))))


def _row(report: Report, name: str, found: Quality, is_time: bool = True) -> None:
    errors = (f"{found.mape:.1%}", f"{found.p95:.1%}") if is_time else ("", "")
    order = ((found.tau, ".3f"), (found.regret, ".1%"), (found.worst_regret, ".1%"), (found.regret_of_3, ".1%"))
    shown = ["" if x is None else f"{x:{form}}" for x, form in (*order, (found.pairs, ".1%"))]
    report.rows.append(("trials", name, *errors, *shown, f"{found.bias:+.1%}" if is_time else ""))
