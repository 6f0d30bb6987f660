"""A rank of `benchmarks.gpu.world`: trains by every strategy's plans, and compares with one process.

python -m benchmarks.gpu.rank FILE, with torchrun's variables
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group, Rendezvous, join
from autopar.runtime.job.servers import serve_here
from autopar.runtime.optimizers.optimizer import context_for
from autopar.runtime.program import Program
from autopar.strategies import STRATEGIES
from autopar.testing.cases import SERVERS, Use, uses
from autopar.testing.tasks import TASKS, Task
from autopar.testing.training import TRAININGS, batches, trained
from benchmarks.gpu.placed import task_on

EQUAL = 1e-10
STEPS = 3
SHOWN = 3
SMALL = 6
"""Cases on the processor, where only the way to them is looked at."""
NAMES = [t for t in TRAININGS if t != "plain"]


@dataclass(frozen=True)
class Case:
    """One plan of a strategy, for one model."""

    name: str
    task: Task
    graph: TrainingGraph
    use: Use
    training: str


def cases(device: str, rank: int, world_size: int) -> Iterator[Case]:
    """Every strategy with its plainest and its last setting, on every model that it applies to, exact plans alone."""
    graphs: dict[str, TrainingGraph] = {}
    for strategy in STRATEGIES.values():
        for each in TASKS.values():
            task = task_on(each, device)
            if each.name not in graphs:
                first = batches(task, "sgd", "unequal", 0, rank)[0]
                graphs[each.name] = training_graph(task.model(), flatten(first), task.loss_fn)
            optimizer = torch.optim.SGD(task.model().parameters(), lr=0.05, momentum=0.9)
            context = context_for(world_size, optimizer, "element", None, True, late_parameters=True)
            for use in uses(strategy, graphs[each.name], context):
                if use.fidelity == "exact":
                    training = NAMES[len(use.options + each.name + strategy.name) % len(NAMES)]
                    name = f"{strategy.name} ({use.options}), {each.name}, {training}"
                    yield Case(name, task, graphs[each.name], use, training)


@click.command()
@click.argument("file")
@click.option("--device", default="cuda")
@click.option("--behind", default=0, help="So many cases are left out: they were looked at before.")
@click.option("--seconds", default=60.0)
def main(file: str, device: str, behind: int, seconds: float) -> None:
    """Looks at the cases for as long as there is time, which rank 0 tells the others."""
    warnings.simplefilter("ignore")
    end = time.monotonic() + seconds
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    group = join(60.0)
    if group.rank == 0:
        serve_here(SERVERS)
    with Path(file).open("w") as out:

        def say(**found: Any) -> None:
            out.write(json.dumps(found) + "\n")
            out.flush()

        for number, case in enumerate(cases(device, group.rank, group.world_size)):
            if number < behind:
                continue
            if device == "cpu" and number >= SMALL:
                break
            over = Rendezvous(group).from_rank_0("time", lambda: "over" if time.monotonic() > end else "")
            if over:
                break
            say(case=case.name)
            try:
                say(case=case.name, off=_off(case, group, device))
            except Exception as e:
                say(case=case.name, why=f"rank {group.rank}: {type(e).__name__}: {str(e)[:300]}")
                raise
    dist.barrier()
    dist.destroy_process_group()


def _off(case: Case, group: Group, device: str) -> float:
    """The largest difference from one process, in parameters and losses."""
    task, how = case.task, TRAININGS[case.training]
    model = task.model()
    optimizer = how.optimizer(model.parameters())
    context = context_for(group.world_size, optimizer, "element", how.clip, True, late_parameters=True)
    program = Program(model, case.use.plan, group, optimizer, Settings(task.loss_fn, how.clip), context)
    first = batches(task, case.training, "unequal", 0, group.rank)[0]
    program.adopt(case.graph, flatten(first))
    outcome = trained(program, task, case.training, "unequal", STEPS)
    off = outcome.differences(task, case.training, "unequal", group.world_size)
    assert next(model.parameters()).device.type == device, "parameters stay on the device"
    return max(off.values())


if __name__ == "__main__":
    main()
