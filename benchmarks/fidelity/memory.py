"""Peak memory: what torch has allocated at most during a step, beside what was predicted. Real models, two ranks here,
plans that differ in what they keep."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import click

from autopar.errors import PlanError
from autopar.lab import Job, loopback
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from benchmarks.harness import Report, Target
from benchmarks.peers.case import Case
from benchmarks.suite import WORKLOADS

RANKS = 2
PLANS = ("ddp", "all_reduce_one_bucket", "zero1", "PSLoadBalancing", "structured", "sharded_tables_zero1", "sharded")
TIMEOUT_S = 300.0
WORKER = (sys.executable, "-m", "benchmarks.fidelity.memory_rank")
WITHIN = 0.05


def fill(report: Report) -> None:
    """A row for each workload and plan, and the target."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    off: list[float] = []
    for workload, plan, measured in _measured():
        assert plan.prediction is not None
        predicted = plan.prediction.peak_memory_bytes
        off.append(predicted / measured - 1)
        shown = f"{predicted / 2**20:.0f} MiB said, {measured / 2**20:.0f} MiB held"
        report.rows.append(("memory", f"{workload}, {plan.name}: {shown}", f"{abs(off[-1]):.1%}"))
    within = sum(abs(x) <= WITHIN for x in off)
    report.notes.append(
        f"Memory: the most that torch had allocated in a step, on the rank that holds most, over {len(off)} plans on "
        f"{RANKS} ranks; {within} of {len(off)} within {WITHIN:.0%}, at worst {max(map(abs, off)):.1%}, bias "
        f"{mean(off):+.1%}. What is resident besides is the allocator's, the libraries' and Python's."
    )
    report.targets.append(Target("peak memory: the worst plan", max(map(abs, off)), WITHIN))


def of_plan(workload: str, path: str) -> dict[str, Any]:
    """What a rank is asked: the memory of a plan."""
    return {"workload": workload, "peer": "autopar", "options": {"plan": path}}


def _measured() -> Iterator[tuple[str, Plan, int]]:
    cluster = ClusterSpec.local(RANKS)
    with loopback(cluster) as lab, TemporaryDirectory(prefix="autopar-") as folder:
        for name, workload in WORKLOADS.items():
            case = Case(workload, "local", cluster, Path(folder))
            with Job(lab.ranks, WORKER, {"OMP_NUM_THREADS": "1"}) as job:
                for builder in PLANS:
                    try:
                        plan = case.built(builder)
                    except PlanError as e:
                        click.echo(f"{name}, {builder}: {e}", err=True)
                        continue
                    answers = job.ask(of_plan(name, case.save(plan)), TIMEOUT_S)
                    held = [a["allocated_bytes"] >> 20 for a in answers]
                    resident = [a["resident_bytes"] >> 20 for a in answers]
                    click.echo(f"{name}, {builder}: {held} MiB allocated, {resident} MiB resident", err=True)
                    yield name, plan, max(a["allocated_bytes"] for a in answers)
