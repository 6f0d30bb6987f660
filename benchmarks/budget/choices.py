"""Choices under a budget, judged: what `optimize(..., budget=)` takes on each task, what it loses, how fast it is.

A cell is a task, a network and a budget. The choice is made as a user would have it made; then the chosen plan trains
to the end, beside exact training of the same weights and batches. Speeds are those that are predicted of a network with
compute as the device's data sheet has it; what a plan loses does not depend on them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path

import torch

import autopar
from autopar.quality.candidates import predicted_s
from autopar.quality.degradation import FILE
from autopar.quality.program import BudgetedProgram
from autopar.spec.cluster import ClusterSpec
from benchmarks.budget.methods import EXACT
from benchmarks.budget.outcome import records
from benchmarks.budget.task import Task
from benchmarks.budget.tasks import TASKS
from benchmarks.budget.training import Trained, finished, lost_by, train
from benchmarks.processes import on_ranks

NETWORKS = ("1 Gbit/s", "200 Mbit/s", "50 Mbit/s")
BUDGETS = (0.005, 0.01, 0.02)
METRIC_SAMPLES = 2_000
"""Of the metric that a user would hand in: another set than the one that judges."""


@dataclass(frozen=True)
class Cell:
    """What was chosen in one cell, and what came of it."""

    task: str
    network: str
    budget: float
    seed: int
    chosen: str
    speed: float
    """Exact training's time over the chosen plan's, as predicted, for all steps."""
    rounded_speed: float
    """The same of the fastest plan that only rounds."""
    expected: float | None
    """What the map expected the chosen plan to lose, and at most; 0 where it is exact, `None` for everything."""
    bound: float | None
    lost: float | None
    lost_error: float | None
    guard: str
    """Why the guard stepped in; empty where it did not."""
    learned: str = ""
    """The map that the choice rests on, as `map_digest` has it."""
    probe_s: float | None = None
    """Seconds that making plans and probing them took on this machine."""
    pilot_part: float = 0.0
    """Part of the training's steps that pilots took."""

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.task, self.network, self.budget, self.seed


def map_digest() -> str:
    """Of the map that comes with autopar: choices of different maps cannot be judged together."""
    return hashlib.sha256(files("autopar.quality").joinpath(FILE).read_bytes()).hexdigest()[:12]


def read(path: Path) -> dict[tuple[str, str, float, int], Cell]:
    """The cells of a journal whose choice rests on the map that comes with autopar."""
    return {cell.key: cell for cell in records(path, Cell) if cell.learned == map_digest()}


def cluster_of(ranks: int, network: str) -> ClusterSpec:
    """Equal hosts of a processor each, on one switch."""
    return ClusterSpec.loads(
        f"{{hosts: [{{name: host, count: {ranks}, devices: 1 x cpu}}], network: {{bandwidth: {network}}}}}"
    )


def run(rank: int, ranks: int, name: str, cells: Sequence[tuple[str, float]], seed: int, journal: str) -> None:
    """A task's cells of one seed in this rank; rank 0 adds each to the journal."""
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    task = TASKS[name]
    exact = train(task, EXACT, seed, rank, ranks)
    gained = float(task.trivial().double().mean()) - float(exact.values.mean())
    known: dict[str, tuple[Trained, str]] = {}
    for network, budget in cells:
        program = chosen(task, seed, rank, ranks, network, budget)
        if program.plan.digest not in known:
            is_exact = program.plan.fidelity == "exact"
            trained = exact if is_exact else finished(task, program, seed, rank, ranks)
            known[program.plan.digest] = trained, "" if program.guard is None else program.guard.reason
        if rank == 0:
            of, trained_by = (network, budget, seed), known[program.plan.digest]
            cell = replace(judged(task, program, of, trained_by, exact, gained), learned=map_digest())
            with Path(journal).open("a") as file:
                file.write(json.dumps(asdict(cell)) + "\n")


def chosen(task: Task, seed: int, rank: int, ranks: int, network: str, budget: float) -> BudgetedProgram:
    """The choice, as a user would have it made."""
    model = task.build(seed)
    optimizer = task.optimizer(model)
    batches = (task.rank_batch(seed, step, rank) for step in itertools.count())

    def metric(model: torch.nn.Module) -> float:
        return float(task.metric_on(model, METRIC_SAMPLES // ranks, rank).mean())

    program = autopar.optimize(
        model,
        cluster_of(ranks, network),
        example_inputs=task.rank_batch(seed, 0, rank),
        loss_fn=task.loss_fn,
        optimizer=optimizer,
        budget=autopar.QualityBudget(budget, metric, batches, task.steps, higher_is_better=False),
        time_budget_s=30.0,  # more than these models need, so that a loaded machine finds the same plans
    )
    assert isinstance(program, BudgetedProgram)
    return program


def judged(
    task: Task,
    program: BudgetedProgram,
    of: tuple[str, float, int],
    trained: tuple[Trained, str],
    exact: Trained,
    gained: float,
) -> Cell:
    """A cell, on rank 0."""
    (network, budget, seed), plan = of, program.plan
    choice = plan.quality
    assert choice is not None
    taken = next((one for one in choice.considered if one.name == plan.name), None)
    rounded = min((o.step_time_s for o in choice.considered if o.name == "rounded"), default=choice.exact_step_s)
    lost, error = lost_by(trained[0], exact, gained)
    return Cell(
        task.name,
        network,
        budget,
        seed,
        plan.name,
        choice.exact_step_s / ((taken and taken.training_step_s) or predicted_s(plan)),
        choice.exact_step_s / min(rounded, choice.exact_step_s),
        0.0 if taken is None else taken.expected,
        0.0 if taken is None else taken.bound,
        lost,
        error,
        trained[1],
        probe_s=choice.probe_s,
        pilot_part=choice.pilot_steps / task.steps,
    )


def start(name: str, cells: Sequence[tuple[str, float]], seed: int, journal: Path) -> None:
    """Starts the ranks of a task, and waits for them. Raises where one of them does."""
    on_ranks(TASKS[name].ranks, run, name, tuple(cells), seed, str(journal))
