"""Beside random plans: the workloads of the suite, on as many evaluations."""

from __future__ import annotations

from math import exp, log
from statistics import mean

import torch

from autopar.search.searchers import DEFAULT
from benchmarks.harness import Report, Target
from benchmarks.search_quality.job import EVALUATIONS, Job, captured, found
from benchmarks.search_quality.part import Asked, Figures, Kept
from benchmarks.suite import WORKLOADS
from benchmarks.suite.clusters import case_named

CLUSTERS = ("4x1g", "3x1g-1x200m", "2x2-1g", "4x1g-2-servers")
RANDOM = "random"
EQUAL = 1e-9


def cases() -> list[str]:
    """Every workload on every one of these clusters: `bert on 4x1g`."""
    return [f"{workload} on {cluster}" for workload in WORKLOADS for cluster in CLUSTERS]


def run(report: Report, kept: Kept, asked: Asked) -> None:
    """A row for each workload on a cluster; then the targets."""
    ratios: list[float] = []
    worse = better = possible = 0
    for case in filter(asked.holds, cases()):
        figures = kept.of(f"random/{case}", lambda case=case: measured(case))  # type: ignore[misc]
        report.data[f"random/{case}"] = figures
        ours, theirs, seed = figures[DEFAULT], figures[RANDOM], figures["best_seed_s"]
        ratio = theirs["fastest_s"] / ours["fastest_s"]
        ratios.append(ratio)
        worse += ratio < 1 - EQUAL
        better += ratio > 1 + EQUAL
        possible += min(theirs["fastest_s"], ours["fastest_s"]) < seed * (1 - EQUAL)
        said, beside = (f"{1e3 * f['fastest_s']:.4g} ms, {f['priced']} priced" for f in (ours, theirs))
        beside += f"; best seed {1e3 * seed:.4g} ms"
        report.rows.append(("random", case, said, beside, f"{ratio:.4f}"))
    if not ratios:
        return
    report.targets.append(Target("random: cases in which random search is better", worse, 0))
    report.targets.append(Target("random: strictly better, where a seed can be beaten", better, possible, "at least"))
    report.notes.append(
        f"random: the fastest plan that fits, of {EVALUATIONS} evaluations each from the same seeds; ratio: how many "
        f"times faster than random search's, {exp(mean(map(log, ratios))):.3f} in the geometric mean. Where neither "
        "beats the best seed, both return it: such a tie counts as not worse, and is left out of the second target."
    )


def measured(case: str) -> Figures:
    """What both searchers find for a workload on a cluster."""
    job = job_of(*case.split(" on "))
    by_default, by_chance = (found(job, name) for name in (DEFAULT, RANDOM))
    return {DEFAULT: by_default.figures, RANDOM: by_chance.figures, "best_seed_s": by_default.best_seed_s}


def job_of(workload: str, cluster: str) -> Job:
    """A workload of the suite, made without weights, on a cluster of the suite."""
    made, place = WORKLOADS[workload], case_named(cluster).cluster
    with torch.device("meta"):
        model = made.model()
    optimizer = made.optimizer(model)
    return captured(f"{workload} on {cluster}", model, made.batch(0, 0), made.loss_fn, place, optimizer)
