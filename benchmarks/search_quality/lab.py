"""Measured in the lab: the default's plan beside the best of 100 random and mutated plans.

The 100 are trials as `benchmarks.trials` takes them, all in one choice, kept in a journal of their own that may be
packed into the data set. The default's plan then takes turns with the fastest few of them.
"""

from __future__ import annotations

from dataclasses import replace

import click

from autopar.cost_models import AnalyticCostModel
from autopar.lab import Lab, unavailable_reason
from autopar.lab.pool import Pool
from autopar.search.base import executed
from autopar.search.moves import Groups
from autopar.search.searchers import DEFAULT
from benchmarks.harness import RESULTS, Report, Target, alone
from benchmarks.search_quality.job import Job, found
from benchmarks.search_quality.part import Asked, Figures, Kept
from benchmarks.suite.clusters import backend_in_lab
from benchmarks.trials.making.cells import Cell, Draw
from benchmarks.trials.making.collect import LIMITS, Collector
from benchmarks.trials.making.journal import Journal
from benchmarks.trials.records import ALWAYS, Trial

WORKLOADS, CLUSTERS = ("llama", "dlrm", "vgg"), ("4x400m", "2x2-200m")
PLANS, FASTEST, WITHIN = 100, 3, 0.03
TRIAL_S = 3.0
"""For the timed steps of each of the 100."""
ROUNDS = 9
"""In which the default's plan and one of the fastest take turns."""
MINUTES = 60.0
TRIALS = RESULTS / "search-quality-trials.jsonl"


def cases() -> list[str]:
    """Each workload on each cluster: `llama on 4x400m`."""
    return [f"{workload} on {cluster}" for workload in WORKLOADS for cluster in CLUSTERS]


def run(report: Report, kept: Kept, asked: Asked) -> None:
    """A row and a target for each workload on a cluster."""
    for case in filter(asked.holds, cases()):
        figures = kept.of(f"lab/{case}", lambda case=case: measured(case, kept))  # type: ignore[misc]
        report.data[f"lab/{case}"] = figures
        ratio = max(figures["ratios"])
        best = f"best of {figures['plans']}: {1e3 * figures['best_s']:.4g} ms alone"
        said = f"{1e3 * figures['ours_s']:.4g} ms, said {1e3 * figures['said_s']:.4g} ms"
        said += f", {1 / figures['dilation']:.3g} times as fast as the cluster"
        report.rows.append(("lab", case, said, best, f"{ratio:.4f}"))
        report.targets.append(Target(f"lab: {case}, of the best of {PLANS}", ratio, 1 + WITHIN))
    report.notes.append(
        f"lab: {PLANS} random and mutated plans, each measured once for {TRIAL_S:g} s; the {FASTEST} fastest take "
        f"turns with the default's plan, {ROUNDS} rounds each, and the largest ratio counts. Compute is slept through."
    )


def measured(case: str, kept: Kept) -> Figures:
    """Takes the trials that are missing, searches, and runs the plan beside the fastest of them. Raises
    `click.ClickException` where there is no lab."""
    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no lab here: {reason}")
    workload, cluster = case.split(" on ")
    with alone(), Journal(TRIALS) as journal:
        collector = Collector(journal, progress=kept.say, one_choice=True, budget_s=TRIAL_S, new_trials=PLANS)
        cell = next(collector.cells([workload], [cluster], ["virtual"]))
        fastest = _trials(collector, journal, cell)
        plans = [(t.step_time_s, journal.known.groups(t)) for t in fastest]
        dilation = fastest[0].dilation
    ours_s, ours = _searched(cell, dilation)
    best = Draw(DEFAULT, ours, dilation, None)
    ratios, taken = [], []
    with alone(), Lab.of(cell.case.cluster) as lab, Pool(lab, LIMITS) as pool:
        lab.set_rates(cell.case.cluster, scale=1 / dilation)
        for _, groups in plans[:FASTEST]:
            if executed(groups) == executed(ours):
                ratios.append(1.0)
                continue
            compared = pool.compare(cell.spec(replace(best, groups=groups)), cell.spec(best), ROUNDS)
            ratios.append(compared.ratio)
            taken.append(compared.b.step_time_s)
    said = {"plans": len(plans), "best_s": plans[0][0], "ratios": ratios, "said_s": dilation * ours_s}
    return {**said, "ours_s": min(taken, default=plans[0][0]), "dilation": dilation}


def _trials(collector: Collector, journal: Journal, cell: Cell) -> list[Trial]:
    """The good trials of different plans of a cell, the fastest first, once there are enough."""

    def good() -> list[Trial]:
        known = journal.known
        mine = [
            t
            for t in known.trials
            if t.ok and t.plan != ALWAYS and not t.repeat
            and (known.workload(t), known.cluster_name(t)) == (cell.workload.name, cell.case.name)
        ]  # fmt: skip
        return sorted({t.key: t for t in mine}.values(), key=lambda t: t.step_time_s)

    while len(good()) < PLANS:
        before = len(good())
        missing = PLANS - before + 2  # DDP, and a repeat
        collector.run(MINUTES, [cell.workload.name], [cell.case.name], missing, ["virtual"])
        if len(good()) == before:
            raise click.ClickException(f"{cell.name}: no trial could be taken")
    return good()[:PLANS]


def _searched(cell: Cell, dilation: float) -> tuple[float, Groups]:
    """What the default finds with what the lab is, as `benchmarks.overlap` has it: seconds said, and the groups."""
    problem = cell.problem
    backend = backend_in_lab(dilation, virtual=True)
    model = AnalyticCostModel(cell.workload.optimizer, backend=backend)
    job = Job(cell.name, cell.graph, problem.cluster, problem.context, model, problem.fidelity)
    result = found(job, DEFAULT)
    assert result.plan is not None
    return result.step_s, result.plan.groups
