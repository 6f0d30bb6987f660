"""One rank of one system. Started by `benchmarks.demo.compare`; trains as many steps as it is asked to.

Arguments: the system (`autopar` or `ddp`), the task as JSON, and, for autopar, the plan's file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.lab import serve
from benchmarks.demo.task import Task
from benchmarks.interleaved import time_steps

Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def ddp_step(task: Task) -> Step:
    """DDP as its documentation has it; the loss is this rank's."""
    model = torch.nn.parallel.DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = task.optimizer(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def autopar_step(task: Task, plan: str) -> Step:
    """The planned program; the loss is the mean over all ranks."""
    import autopar

    model = task.model()
    program = autopar.optimize(
        model,
        example_inputs=task.batch(0, dist.get_rank()),
        optimizer=task.optimizer(model),
        plan=autopar.Plan.load(plan),
    )
    return program.step


def main(system: str, task_json: str, plan: str | None = None) -> None:
    """Prepares the system, then answers `{"first": step, "count": steps}` with the time and loss of each step."""
    torch.set_num_threads(1)  # Ranks share the machine's cores, one each at most.
    dist.init_process_group("gloo")
    task = Task(**json.loads(task_json))
    rank = dist.get_rank()
    step = ddp_step(task) if plan is None else autopar_step(task, plan)

    def answer(request: dict[str, Any]) -> dict[str, list[float]]:
        numbers = range(request["first"], request["first"] + request["count"])
        return time_steps(step, [task.batch(number, rank) for number in numbers])

    serve(answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
