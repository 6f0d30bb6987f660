"""What the strategies that use structure save: autopar beside DDP, tuned by a sweep of its bucket size.

    python -m benchmarks.strategies [--only CASE] [--check] [--json FILE] [--save]

Each case is a workload on a cluster of the lab. autopar takes the plan that its search finds, within what is exact;
all take blocks of steps in turn on the same ranks, as in `benchmarks.peers`. The last case is held against its floor
rather than against DDP (`benchmarks.overlap`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from autopar.lab import Job, Lab, loopback, unavailable_reason
from benchmarks import overlap
from benchmarks.fidelity.memory import TIMEOUT_S, WORKER, of_plan
from benchmarks.harness import Report, Target, options, publish
from benchmarks.overlap import Overlap
from benchmarks.peers.case import Case, Effort
from benchmarks.peers.measure import Contest
from benchmarks.peers.outcome import COMPARED_STEPS, CaseOutcome, Entry, relative
from benchmarks.peers.ranks import Ranks
from benchmarks.peers.table import figures
from benchmarks.suite import workload_named
from benchmarks.suite.clusters import case_named

TUNED, SPARSE = "ddp_buckets", "ddp_sparse"
EFFORT = Effort(rounds=7, slow_rounds=7, rounds_s=60.0, block_s=4.0, block_steps=4, search_time_s=10.0)
COLUMNS = ("case", "system", "ms a step", "times as long", "MB sent a rank and step", "loss difference", "plan")


@dataclass(frozen=True)
class Goal:
    """A case, and how many times as fast as each peer autopar shall be."""

    workload: str
    cluster: str
    faster: Mapping[str, float]
    memory: float | None = None
    """Its peak memory, as part of DDP's, at most."""

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.cluster}"


GOALS = (
    Goal("dlrm", "4x200m", {TUNED: 20.0, SPARSE: 1.3}),
    Goal("vgg", "4x1g", {TUNED: 3.0}),
    Goal("faces", "4x1g", {TUNED: 10.0}, memory=0.3),
    Goal("bert", "4x200m", {TUNED: 2.0}),
    Goal("gpt2", "4x200m", {TUNED: 2.0}),
    Goal("resnet50", "3x1g-1x200m", {TUNED: 1.35}),
    Goal("resnet50", "2x2-200m", {TUNED: 1.35}),
    Goal("resnet50", "4x200m-2-servers", {TUNED: 1.3}),
)
"""On two hosts of two ranks, DDP's all-reduce is the flat ring."""


@click.command()
@click.option("--only", multiple=True, metavar="WORKLOAD/CLUSTER", help="This case alone; may be repeated.")
@options
def main(only: tuple[str, ...], check: bool, json_file: str | None, save: bool) -> None:
    """Measures every case, about three minutes each."""
    cases = [*(g.name for g in GOALS), overlap.NAME]
    if strangers := set(only) - set(cases):
        raise click.UsageError(f"no case {', '.join(strangers)}; there are {', '.join(cases)}")
    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"without network namespaces there is no network to save: {reason}")
    name = "-".join(["strategies", *(case.replace("/", "-") for case in only)])
    report = Report(name=name, title="What structure saves, against DDP", columns=COLUMNS)
    start = time.monotonic()
    for goal in GOALS:
        if not only or goal.name in only:
            fill(report, goal, _measure(goal, start))
            if goal.memory is not None:
                weigh(report, goal)
    if not only or overlap.NAME in only:
        found = overlap.Step(EFFORT.search_time_s).measure(lambda what: _say(start, overlap.NAME, what))
        fill_overlap(report, found)
    report.notes.append(
        "DDP takes the fastest bucket size of a sweep. Times are medians over rounds in which all take a block of "
        "steps in turn; the ratio is the median (quartiles) over rounds. The loss difference is the greatest relative "
        f"one to DDP over the first {COMPARED_STEPS} steps."
    )
    command = " ".join(["python -m benchmarks.strategies", *(f"--only {o}" for o in only)])
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


def _measure(goal: Goal, start: float) -> CaseOutcome:
    cluster = case_named(goal.cluster)
    with (
        Lab.of(cluster.cluster) as lab,
        Ranks(lab.ranks, lab.servers) as ranks,
        TemporaryDirectory(prefix="autopar-") as folder,
    ):
        case = Case(workload_named(goal.workload), goal.cluster, cluster.cluster, Path(folder), EFFORT.search_time_s)

        contest = Contest(case, ranks, EFFORT, lambda what: _say(start, goal.name, what))
        return contest.run(tuple(goal.faster), f"{cluster.about}, {lab.note}", lab.emulated)


def _say(start: float, case: str, what: str) -> None:
    click.echo(f"[{time.monotonic() - start:4.0f} s] {case}: {what}", err=True)


def fill(report: Report, goal: Goal, outcome: CaseOutcome) -> None:
    """Adds a case's rows and targets."""
    by_name = {e.name: e for e in outcome.entries if e.fidelity == "exact"}
    ours = next((e for e in by_name.values() if e.ours), None)
    for entry in by_name.values():
        report.rows.append(_row(goal, outcome, entry, ours))
    for peer, factor in goal.faster.items():
        found = by_name.get(peer)
        name = f"{goal.name}: times as fast as {peer}"
        if ours is None or found is None:
            report.notes.append(
                f"Not measured: {goal.name}, {peer}: {outcome.absent.get(peer, 'autopar did not run')}."
            )
            report.targets.append(Target(name, None, factor, "at least"))
            continue
        speed = relative(found.system, ours.system).median
        right = outcome.computes_the_same(ours)
        report.targets.append(Target(name, speed if right else None, factor, "at least"))
        report.data[f"{goal.name} {peer}"] = speed


def weigh(report: Report, goal: Goal) -> None:
    """Adds the target of a case's memory: the most that torch has allocated in a step, on the rank that holds most."""
    cluster = case_named(goal.cluster).cluster
    with loopback(cluster) as lab, TemporaryDirectory(prefix="autopar-") as folder:
        case = Case(workload_named(goal.workload), goal.cluster, cluster, Path(folder), EFFORT.search_time_s)
        ours = of_plan(goal.workload, case.save(case.searched("exact")))
        theirs = {"workload": goal.workload, "peer": "ddp", "options": {}}
        most = []
        for request in (ours, theirs):
            with Job(lab.ranks, WORKER, {"OMP_NUM_THREADS": "1"}, lab.servers) as job:
                most.append(max(a["allocated_bytes"] for a in job.ask(request, TIMEOUT_S)))
    assert goal.memory is not None
    report.notes.append(
        f"{goal.name}: torch has allocated at most {most[0] / 2**20:.0f} MiB a rank in a step of autopar, "
        f"{most[1] / 2**20:.0f} MiB in one of DDP."
    )
    report.targets.append(Target(f"{goal.name}: peak memory, as part of DDP's", most[0] / most[1], goal.memory))


def fill_overlap(report: Report, found: Overlap) -> None:
    """Adds what a step across iterations takes, and how near it comes to its floor."""
    ours_s = found.step_s[overlap.OURS]
    for name, step_s in found.step_s.items():
        times = "" if name == overlap.OURS else f"{step_s / ours_s:.2f}"
        sent = found.sent_bytes[name]
        shown = "not counted" if sent is None else f"{sent / 1e6:.2f}"
        note = f"predicted {found.predicted_s[name] * 1e3:.0f} ms"
        report.rows.append((overlap.NAME, name, f"{step_s * 1e3:.0f}", times, shown, "nothing is computed", note))
    report.notes.append(
        f"{overlap.NAME}: {overlap.PICTURES} pictures of {overlap.SIDE} x {overlap.SIDE} a rank; compute is slept "
        f"through, {found.compute_s * 1e3:.0f} ms of it. What autopar's plan sends takes {found.bytes_s * 1e3:.0f} ms "
        f"at the link's rate, without headers. {found.noise}".strip()
    )
    report.targets.append(
        Target(f"{overlap.NAME}: step, in max(compute, bytes over bandwidth)", ours_s / found.floor_s, 1.1)
    )
    report.data[overlap.NAME] = ours_s / found.floor_s


def _row(goal: Goal, outcome: CaseOutcome, entry: Entry, ours: Entry | None) -> tuple[str, ...]:
    step_ms, sent, difference = figures(outcome, entry)
    ratio = "" if entry.ours or ours is None else f"{relative(entry.system, ours.system):.2f}"
    options = "; ".join(f"{key} {value}" for key, value in entry.system.options.items() if key != "plan")
    return (goal.name, entry.name, step_ms, ratio, sent, difference, options)


if __name__ == "__main__":
    main()
