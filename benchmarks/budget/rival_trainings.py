"""Trains tasks with adaptive compression as others have it (`rivals`).

The training has 10 parts, the first of which is exact, as it is for the methods; rates are decided behind each. They
become a plan whose groups have these rates, which goes on from the one before: the same residuals, new factors.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.program import Program
from autopar.spec.plan import Plan
from benchmarks.budget.choices import NETWORKS
from benchmarks.budget.hindsight import built, speed_of
from benchmarks.budget.methods import EXACT
from benchmarks.budget.outcome import records
from benchmarks.budget.rivals import RIVALS, Gradients, Rival, with_rates
from benchmarks.budget.task import Task
from benchmarks.budget.tasks import TASKS
from benchmarks.budget.training import Trained, evaluated, lost_by
from benchmarks.budget.training import train as train_method
from benchmarks.processes import on_ranks

PARTS = 10
"""Of the training."""
LOOKED_AT = 10
"""Batches whose gradients are added up for a decision."""


def gradients(task: Task, model: nn.Module, seed: int, steps: Sequence[int]) -> Gradients:
    """Rank 0's own, added up over its batches of these steps."""
    model = copy.deepcopy(model)
    for step in steps:
        inputs, target = task.rank_batch(seed, step, 0)
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        task.loss_fn(output, target).backward()  # type: ignore[no-untyped-call]
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def decided(
    rival: Rival, task: Task, model: nn.Module, at: tuple[int, int, int], before: Gradients | None
) -> tuple[dict[str, float], Gradients | None]:
    """The rates that a rival decides behind a part of the training, and on rank 0, which decides, the gradients that
    they rest on. By all ranks together. `at`: the seed, the next step, and this process's rank."""
    seed, step, rank = at
    now = gradients(task, model, seed, range(max(step - LOOKED_AT, 0), step)) if rank == 0 else None
    rates = {} if now is None else rival.decide(now, before, step / task.steps)
    names = [n for n, _ in model.named_parameters()]
    told = torch.tensor([rates.get(n, math.nan) for n in names], dtype=torch.float64)
    dist.broadcast(told, 0)
    return {n: r for n, r in zip(names, told.tolist(), strict=True) if not math.isnan(r)}, now


def train(task: Task, rival: Rival, seed: int, rank: int, ranks: int) -> tuple[Trained, list[Plan]]:
    """Trains a task to its end. Returns what came of it, and the plan of each part."""
    begun = time.perf_counter()
    model = task.build(seed)
    optimizer = task.optimizer(model)
    groups = optimizer.param_groups
    first_rates = [group["lr"] for group in groups]
    uniform = built(task.name, rival.strategy)

    def program_of(plan: Plan) -> Program:
        return autopar.optimize(
            model,
            autopar.ClusterSpec.local(ranks),
            example_inputs=task.rank_batch(seed, 0, rank),
            loss_fn=task.loss_fn,
            optimizer=optimizer,
            plan=plan,
        )

    program, plans, losses = program_of(built(task.name, "ddp")), list[Plan](), list[float]()
    looked_at: Gradients | None = None
    bounds = [round(i * task.steps / PARTS) for i in range(PARTS + 1)]
    for begin, end in itertools.pairwise(bounds):
        if begin:
            rates, looked_at = decided(rival, task, model, (seed, begin, rank), looked_at)
            plan = with_rates(uniform, rival.option, rates)
            if plan.groups != program.plan.groups:
                state = program.state_dict()
                program = program_of(plan)
                program.load_state_dict(state)
        plans.append(program.plan)
        for step in range(begin, end):
            for group, rate in zip(groups, first_rates, strict=True):
                group["lr"] = rate * task.rate(step)
            losses.append(float(program.step(task.rank_batch(seed, step, rank))))
    values = evaluated(task, program.model, rank, ranks)
    return Trained(values, tuple(losses), time.perf_counter() - begun), plans


@dataclass(frozen=True)
class RivalOutcome:
    """What a rival lost, and how fast it is."""

    task: str
    rival: str
    seed: int
    lost: float | None
    """What it lost to exact training, as a part of what that gained."""
    lost_error: float | None
    speeds: dict[str, float]
    """By network, exact training's time over the rival's, over all steps."""


def read(path: Path) -> dict[tuple[str, str, int], RivalOutcome]:
    """All that can be read of a journal."""
    return {(one.task, one.rival, one.seed): one for one in records(path, RivalOutcome)}


def run(rank: int, ranks: int, name: str, rivals: Sequence[str], seed: int, journal: str) -> None:
    """A task's rivals of one seed in this rank; rank 0 adds each to the journal."""
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    task = TASKS[name]
    exact = train_method(task, EXACT, seed, rank, ranks)
    gained = float(task.trivial().double().mean()) - float(exact.values.mean())
    for rival in (RIVALS[r] for r in rivals):
        trained, plans = train(task, rival, seed, rank, ranks)
        if rank == 0:
            speed = {n: speed_of(name, n, plans) for n in NETWORKS}
            outcome = RivalOutcome(name, rival.name, seed, *lost_by(trained, exact, gained), speed)
            with Path(journal).open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def start(name: str, rivals: Sequence[str], seed: int, journal: Path) -> None:
    """Starts the ranks of a task, and waits for them. Raises where one of them does."""
    on_ranks(TASKS[name].ranks, run, name, tuple(rivals), seed, str(journal))
