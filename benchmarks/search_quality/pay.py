"""What trials are worth: a whole training with them beside one without, measured in the lab on real compute.

Nothing is calibrated. One search takes the plan that its prices prefer; another one, told how long the training will
be, runs trials where these are expected to pay. Both plans then take turns. A training's time is that of its steps,
and of the trials that it began with.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click

import autopar
from autopar.errors import AutoparWarning
from autopar.lab import Lab, unavailable_reason
from autopar.lab.pool import Pool
from autopar.lab.trial import RealCompute, TrialSpec
from autopar.search import Budget, SearchOptions
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from autopar.trials import Measure, Trials
from benchmarks.harness import Report, Target, alone
from benchmarks.search_quality.job import EVALUATIONS
from benchmarks.search_quality.part import Asked, Figures, Kept
from benchmarks.suite import WORKLOADS
from benchmarks.suite.clusters import case_named
from benchmarks.trials.making.collect import LIMITS

CLUSTERS = ("4x1g", "3x1g-1x200m")
STEPS = 100_000
"""Of the training."""
LOADS = 3
"""Times that the two plans are loaded anew: which one is faster depends by 2 % on where their memory lies."""
ROUNDS, FEWEST, BLOCK = 5, 2, 4
"""Rounds in which they take turns each time; the fewest, where steps are slow; and steps of each plan in a round."""
COMPARED_S = 300.0
"""Seconds that all rounds take, unless the fewest take longer."""
NOT_ABOVE = 0.9
"""Part of the cases in which the whole with trials takes no longer."""
AGAIN = Budget(time_s=1e9, evaluations=EVALUATIONS // 4)


def cases() -> list[str]:
    """Each workload of the suite on each of the two clusters: `bert on 4x1g`. A case takes 1 to 30 minutes.

    The constants of trials were chosen on the first ten, in which the clusters take turns.
    """
    return [*_in_turn(CLUSTERS), *_in_turn(CLUSTERS[::-1])]


def _in_turn(clusters: tuple[str, ...]) -> list[str]:
    return [f"{workload} on {clusters[i % len(clusters)]}" for i, workload in enumerate(WORKLOADS)]


def run(report: Report, kept: Kept, asked: Asked) -> None:
    """A row for each workload on a cluster; then the targets."""
    totals = []
    for case in filter(asked.holds, cases()):
        figures = kept.of(f"pay/{case}", lambda case=case: measured(case, kept.say))  # type: ignore[misc]
        report.data[f"pay/{case}"] = figures
        without_s = STEPS * figures["without_s"]
        with_s = STEPS * figures["without_s"] * figures["ratio"] + figures["trials_s"]
        totals.append((with_s, without_s))
        said = f"{figures['trials']} trials, {figures['trials_s']:.0f} s; then {figures['ratio']:.3f} of a step"
        if loads := figures.get("loads"):
            said += f" ({min(loads):.3f} to {max(loads):.3f})"
        report.rows.append(("pay", case, said, f"{1e3 * figures['without_s']:.4g} ms", f"{with_s / without_s:.4f}"))
    if not totals:
        return
    good = sum(with_s <= without_s for with_s, without_s in totals) / len(totals)
    report.targets.append(Target("pay: part of the cases in which trials cost nothing", good, NOT_ABOVE, "at least"))
    together = sum(with_s for with_s, _ in totals) / sum(without_s for _, without_s in totals)
    report.targets.append(Target("pay: all trainings together", together, 1))
    report.notes.append(
        f"pay: trainings of {STEPS:,} steps, whose plan rests on trials, in the time of those whose plan rests on "
        f"prices alone; the ratio of their steps is the median of {LOADS} times {FEWEST} to {ROUNDS} rounds in turns, "
        "loaded anew each time, and brackets hold the least and the largest of these times' medians; without brackets, "
        "the plans were loaded once, by an older version, and took 7 to 15 rounds. Where no trial was expected to pay, "
        "and where trials confirmed the plan, the two are one plan; what trials took is lost."
    )


def measured(case: str, say: Callable[[str], None]) -> Figures:
    """Searches with and without trials, and runs what both found. Raises `click.ClickException` without a lab."""
    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no lab here: {reason}")
    workload, cluster = case.split(" on ")
    spec = case_named(cluster).cluster
    compute = RealCompute("benchmarks.suite:workload_named", (workload,))
    with TemporaryDirectory(prefix="autopar-") as folder, alone(), Lab.of(spec) as lab, Pool(lab, LIMITS) as pool:
        lab.set_rates(spec)
        began = time.monotonic()
        without = _searched(workload, spec, SearchOptions(evaluations=EVALUATIONS))
        searched_s = time.monotonic() - began
        measure = Measure(pool, compute, f"the lab, as {spec.summary}", one_machine=True)
        log = Path(folder) / "trials.jsonl"
        trials = Trials(measure, steps=STEPS, log=log, again=AGAIN, tell=lambda what, priced, best_s: say(what))
        began = time.monotonic()
        with_trials = _searched(workload, spec, SearchOptions(evaluations=EVALUATIONS, finalists=trials))
        trials_s = max(0.0, time.monotonic() - began - searched_s)
        found = with_trials.measured
        figures: Figures = {
            "trials": 0 if found is None else found.trials,
            "trials_s": 0.0 if found is None else trials_s,
        }
        a, b = (TrialSpec(plan, compute, steps=BLOCK, warmup=2) for plan in (without, with_trials))
        if without.digest == with_trials.digest:
            taken = pool.trial(a)
            return {**figures, "without_s": taken.step_time_s, "ratio": 1.0}
        assert found is not None, "without trials, the two searches are one"
        rounds = int(COMPARED_S / LOADS / (2 * BLOCK * found.best_step_time_s))
        compared = [pool.compare(a, b, max(FEWEST, min(ROUNDS, rounds))) for _ in range(LOADS)]
        without_s = median(step_s for one in compared for step_s in one.a.step_s)
        ratios = [ratio for one in compared for ratio in one.ratios]
        return {**figures, "loads": [c.ratio for c in compared], "without_s": without_s, "ratio": median(ratios)}


def _searched(workload: str, spec: ClusterSpec, search: SearchOptions) -> Plan:
    made = WORKLOADS[workload]
    model = made.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)
        return autopar.plan(
            model,
            spec,
            example_inputs=made.batch(0, 0),
            loss_fn=made.loss_fn,
            optimizer=made.optimizer(model),
            time_budget_s=1e9,
            search=search,
        )
