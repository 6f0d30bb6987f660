"""Probes of methods on the tasks: what a few steps show, beside what a whole training loses.

They are made as those of a choice are: behind as many steps, at the rate that the optimizer is made with.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import autopar
from autopar.quality.choice import AHEAD, PROBE_STEPS
from autopar.quality.probe import Job, Probe, Probed
from autopar.search import build_plan
from benchmarks.budget.methods import EXACT, METHODS
from benchmarks.budget.outcome import Key
from benchmarks.budget.tasks import TASKS
from benchmarks.processes import on_ranks


@dataclass(frozen=True)
class ProbeOutcome:
    """A probe of one method on one task, from one seed's weights."""

    task: str
    method: str
    seed: int
    probed: Probed

    @property
    def key(self) -> Key:
        return self.task, self.method, self.seed


def read(path: Path) -> dict[Key, ProbeOutcome]:
    """All outcomes of a journal that can be read."""
    found: dict[Key, ProbeOutcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            told = json.loads(line)
            one = ProbeOutcome(told["task"], told["method"], told["seed"], Probed(**told["probed"]))
        except (ValueError, KeyError, TypeError):
            continue
        found[one.key] = one
    return found


def run(rank: int, ranks: int, name: str, methods: tuple[str, ...], seed: int, journal: str) -> None:
    """Probes of one task in this rank; rank 0 adds each to the journal."""
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    task, cluster = TASKS[name], autopar.ClusterSpec.local(ranks)
    model = task.build(seed)
    optimizer = task.optimizer(model)
    program = autopar.optimize(
        model,
        cluster,
        example_inputs=task.rank_batch(seed, 0, rank),
        loss_fn=task.loss_fn,
        optimizer=optimizer,
        strategy=EXACT.strategy,
    )
    first = int(AHEAD * task.steps)
    for step in range(first):
        program.step(task.rank_batch(seed, step, rank))
    batches = [task.rank_batch(seed, first + i, rank) for i in range(2 * PROBE_STEPS)]
    job = Job.of(program, batches[0])
    probe = Probe(job, program.plan, batches, PROBE_STEPS)
    for method in methods:
        plan = build_plan(METHODS[method].probe, job.graph, cluster, job.context)
        outcome = ProbeOutcome(name, method, seed, probe.of(plan))
        if rank == 0:
            path = Path(journal)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def missing(path: Path, task: str, seed: int, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Methods that there is no probe of yet, of those that can be probed."""
    known = read(path)
    return tuple(m for m in methods if METHODS[m].probed and (task, m, seed) not in known)


def start(name: str, methods: tuple[str, ...], seed: int, journal: Path) -> None:
    """Starts the ranks of a task, and waits for them. Raises where one of them does."""
    on_ranks(TASKS[name].ranks, run, name, methods, seed, str(journal))
