"""Trains a task on gloo ranks of this machine, with exact synchronization first and then with each method."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar.runtime.program import Program
from benchmarks.budget.methods import EXACT, METHODS, Method
from benchmarks.budget.outcome import Journal, Outcome
from benchmarks.budget.task import Task
from benchmarks.budget.tasks import TASKS
from benchmarks.processes import on_ranks

CURVE_PARTS = 100
"""Points of a curve of training losses."""

OTHER_BATCHES = 1_000_003
"""What is added to the seed of batches, for others."""


@dataclass(frozen=True)
class Trained:
    """What a training left behind, on rank 0."""

    values: torch.Tensor
    """The metric of each test sample."""
    losses: tuple[float, ...]
    """Of each step, over all ranks."""
    seconds: float


def train(task: Task, method: Method, seed: int, rank: int, ranks: int) -> Trained:
    """One training to its end with a method, on all ranks together."""
    begun = time.perf_counter()
    model = task.build(seed)
    optimizer = task.optimizer(model)
    method.prepare(optimizer)
    data = seed + OTHER_BATCHES * method.other_batches
    program = autopar.optimize(
        model,
        autopar.ClusterSpec.local(ranks),
        example_inputs=task.rank_batch(data, 0, rank),
        loss_fn=task.loss_fn,
        optimizer=optimizer,
        strategy=method.plan(task.steps, optimizer),
        fidelity=method.fidelity,
    )
    trained = finished(task, program, data, rank, ranks)
    return replace(trained, seconds=time.perf_counter() - begun)


def finished(task: Task, program: Program, data: int, rank: int, ranks: int) -> Trained:
    """Trains a program that has not stepped yet to the end of the task. `data`: the seed of batches."""
    begun = time.perf_counter()
    groups = program.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    losses = []
    for step in range(task.steps):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * task.rate(step)
        losses.append(float(program.step(task.rank_batch(data, step, rank))))
    with program.gathered():
        average(program.model)
        values = evaluated(task, program.model, rank, ranks)
    return Trained(values, tuple(losses), time.perf_counter() - begun)


@torch.no_grad()
def average(model: torch.nn.Module) -> None:
    """The mean of all ranks' parameters: what local methods end with; the same where ranks are alike."""
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter.div_(dist.get_world_size())


def evaluated(task: Task, model: torch.nn.Module, rank: int, ranks: int) -> torch.Tensor:
    """The metric of each test sample, each rank having evaluated a part."""
    values = task.evaluate(model, rank, ranks)
    dist.all_reduce(values)
    return values


def run(rank: int, ranks: int, name: str, methods: tuple[str, ...], seed: int, journal: str) -> None:
    """A task's trainings of one seed in this rank; rank 0 adds each outcome to the journal."""
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    task = TASKS[name]
    trivial = float(task.trivial().double().mean())
    exact = train(task, EXACT, seed, rank, ranks)
    gained = trivial - float(exact.values.mean())
    for method in (METHODS[m] for m in methods):
        trained = exact if method is EXACT else train(task, method, seed, rank, ranks)
        if rank == 0:
            Journal(Path(journal)).add(outcome(task, method, seed, trained, exact, gained))


def outcome(task: Task, method: Method, seed: int, trained: Trained, exact: Trained, gained: float) -> Outcome:
    """A training beside exact training."""
    part = len(trained.losses) / CURVE_PARTS
    curve = [trained.losses[round(i * part) : round((i + 1) * part)] for i in range(CURVE_PARTS)]
    lost, error = lost_by(trained, exact, gained)
    return Outcome(
        task=task.name,
        method=method.name,
        seed=seed,
        metric=_finite(float(trained.values.mean())),
        gained=gained,
        lost=lost,
        lost_error=error,
        losses=tuple(_finite(sum(part) / len(part)) for part in curve),
        seconds=trained.seconds,
    )


def lost_by(trained: Trained, exact: Trained, gained: float) -> tuple[float | None, float | None]:
    """What a training lost to exact training, as a part of what that gained, with its standard error; `None` where it
    is no number. Raises `ValueError` where exact training gained nothing."""
    if not gained > 0:
        raise ValueError(f"exact training gained {gained:.3g} over the trivial prediction: nothing can be a part of it")
    differences = (trained.values - exact.values) / gained
    error = float(differences.std()) / math.sqrt(len(differences))
    return _finite(float(differences.mean())), _finite(error)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def start(name: str, methods: tuple[str, ...], seed: int, journal: Path) -> None:
    """Starts the ranks of a task, and waits for them. Raises where one of them does."""
    on_ranks(TASKS[name].ranks, run, name, methods, seed, str(journal))
