"""Beside a hundred times the budget: large models on 64 to 1,024 ranks, as `benchmarks.planning` has them."""

from __future__ import annotations

from typing import get_args

import torch

from autopar.errors import InfeasibleError
from autopar.search.searchers import DEFAULT
from autopar.spec.plan import Recompute
from benchmarks.harness import Report, Target
from benchmarks.planning import BY_RANKS, TARGETS
from benchmarks.search_quality.job import EVALUATIONS, Found, Job, captured, found
from benchmarks.search_quality.part import Asked, Figures, Kept

TIMES, WITHIN = 100, 0.02
MOST_S = 600.0
"""A search that takes longer ends with as many evaluations as there was time for."""
PLANNED = {**TARGETS, **{name: BY_RANKS[name] for name in ("bert-large, 256 ranks", "bert-large, 1024 ranks")}}


def run(report: Report, kept: Kept, asked: Asked) -> None:
    """A row and a target for each case."""
    short = []
    for case in filter(asked.holds, PLANNED):
        figures = kept.of(f"large/{case}", lambda case=case: measured(case))  # type: ignore[misc]
        report.data[f"large/{case}"] = figures
        ours, theirs = figures["ours"], figures["theirs"]
        best_s = min(theirs["fastest_s"], ours["fastest_s"])
        ratio = ours["step_s"] / best_s
        said = f"{1e3 * ours['step_s']:.4g} ms, {ours['priced']} priced"
        beside = f"{1e3 * best_s:.4g} ms, {theirs['priced']} priced"
        report.rows.append(("large", case, said, beside, f"{ratio:.4f}"))
        report.targets.append(Target(f"large: {case}, of the best", ratio, 1 + WITHIN))
        if figures["spent"] < TIMES * EVALUATIONS:
            short.append(f"{case} {figures['spent'] / EVALUATIONS:.0f} times")
    report.notes.append(
        f"large: {EVALUATIONS} evaluations beside {TIMES} times as many, which are spent by searches from one random "
        f"seed after the other, for {MOST_S / 60:.0f} minutes at most; less than that: {', '.join(short) or 'none'}."
    )


def measured(case: str) -> Figures:
    """The plan of the default budget, and the best of a hundred times as much."""
    job, ours = _feasible(case)
    best, spent, seed, left_s = ours, ours.searched, 1, MOST_S
    while spent < TIMES * EVALUATIONS and left_s > 0:
        more = found(job, DEFAULT, TIMES * EVALUATIONS - spent, seed, left_s)
        spent, left_s, seed = spent + more.searched, left_s - more.wall_s, seed + 1
        best = min(best, more, key=lambda one: one.fastest_s)
        if not more.searched:
            break
    return {"ours": ours.figures, "theirs": {**best.figures, "priced": spent}, "spent": spent}


def _feasible(case: str) -> tuple[Job, Found]:
    """The job with as little recomputation as fits, and what is found for it."""
    planned = PLANNED[case]
    for recompute in get_args(Recompute):
        with torch.device("meta"):
            model = planned.make()
        batch, loss_fn = planned.batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        job = captured(case, model, batch, loss_fn, planned.cluster, optimizer, recompute, unused_parameters="freeze")
        ours = found(job, DEFAULT, time_s=MOST_S)
        if ours.fastest_s < float("inf"):
            return job, ours
    raise InfeasibleError(f"{case}: no plan fits, with any recomputation")
