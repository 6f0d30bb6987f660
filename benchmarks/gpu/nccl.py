"""One rank on NCCL: every collective of the runtime, training beside eager PyTorch, and waits of the host in a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

import autopar
from autopar.backends import collectives
from autopar.testing.tasks import TASKS
from autopar.testing.training import TRAININGS, batches, trained
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.placed import cluster_of, one_rank, synchronize, task_on
from benchmarks.gpu.setting import Setting

EQUAL = 1e-10
"""Of float64, relative to 1: ten steps."""
STEPS = 10
WARM_UP, LOOKED_AT = 3, 5
"""Steps before, and while the host's waits are counted."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def fill(findings: Findings, setting: Setting) -> None:
    """One rank's rows."""
    _collectives(findings, setting.device)
    for name in list(TASKS)[: 1 if setting.small else None]:
        _training(findings, name, setting.device)
    if setting.device == "cuda":
        _waits(findings)


def _collectives(findings: Findings, device: str) -> None:
    """What one rank sends to itself comes back as it was."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with one_rank(backend, device):
        wrong = _wrong_collectives(device)
    count = len(_KINDS) * len(DTYPES)
    findings.row(f"{count} collectives on {backend}, one rank", "; ".join(wrong) or "all as they should be")
    findings.target("one rank: collectives that are wrong", float(len(wrong)), 0)


_KINDS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "all-reduce": collectives.all_reduce,
    "all-reduce of a copy": collectives.all_reduce_copy,
    "reduce": lambda x, group: collectives.reduce(x, 0, group),
    "broadcast": lambda x, group: collectives.broadcast(x, 0, group),
    "reduce-scatter": lambda x, group: collectives.reduce_scatter(x, [x.numel()], 0, group),
    "all-gather": lambda x, group: collectives.all_gather(x, [x.numel()], 0, group),
    "all-to-all": lambda x, group: collectives.all_to_all(x, [x.numel()], [x.numel()], group),
}


def _wrong_collectives(device: str) -> list[str]:
    """What is wrong with each collective, in words."""
    world = dist.group.WORLD
    assert world is not None, "the default process group"
    wrong = []
    for what, call in _KINDS.items():
        for dtype in DTYPES:
            x = torch.arange(1027, dtype=torch.float64).to(device, dtype)
            try:
                same = torch.equal(collectives.wait(call(x.clone(), world.group_name)).reshape(-1), x)
            except Exception as e:  # the others are looked at all the same
                wrong.append(f"{what} of {dtype} fails: {e}")
            else:
                wrong += [] if same else [f"{what} of {dtype} changes the values"]
    return wrong


def _training(findings: Findings, name: str, device: str) -> None:
    """A model's training by `autopar.optimize` beside eager training, in float64, with each kind of update."""
    task = task_on(TASKS[name], device)
    off: dict[str, float] = {}
    for training, how in TRAININGS.items():
        model = task.model()
        program = autopar.optimize(
            model,
            cluster_of(1, device),
            example_inputs=batches(task, training, "equal", 0, 0)[0],
            loss_fn=task.loss_fn,
            optimizer=how.optimizer(model.parameters()),
            clip_grad_norm=how.clip,
            time_budget_s=0.2,
        )
        outcome = trained(program, task, training, "equal", STEPS)
        off[training] = max(outcome.differences(task, training, "equal", 1).values())
    worst = math.nan if any(map(math.isnan, off.values())) else max(off.values())
    findings.data[name] = off
    findings.row(f"{name}: {len(off)} trainings of {STEPS} steps, one rank, float64", f"{worst:.1e} from eager at most")
    findings.target(f"{name}: one rank's largest difference from eager training", worst, EQUAL)


def _waits(findings: Findings) -> None:
    """How often the host waits for the device in the middle of steps whose batch is on the device."""
    task = task_on(TASKS["dense"], "cuda")
    model = task.model()
    batch = task.batch(4, 0)
    program = autopar.optimize(
        model,
        cluster_of(1, "cuda"),
        example_inputs=batch,
        loss_fn=task.loss_fn,
        optimizer=torch.optim.AdamW(model.parameters()),
        clip_grad_norm=1.0,
        time_budget_s=1.0,
    )
    for _ in range(WARM_UP):
        program.step(batch)
    synchronize("cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(LOOKED_AT):
                program.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in seen if "synchronizing CUDA operation" in str(w.message)]
    where = f", at {', '.join(sorted(set(waits)))}" if waits else ""
    findings.row(f"waits of the host in {LOOKED_AT} steps of one rank", f"{len(waits)}{where}")
    findings.target("one rank: waits of the host in a step", len(waits) / LOOKED_AT, 0)
