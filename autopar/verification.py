"""Proof that a distributed program computes what one process computes.

N gloo ranks run the program, one process trains eagerly, on the same global batches; loss, every gradient and every
parameter are compared after each step. Dropout is switched off, as its random streams differ by design.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from autopar.api import optimize
from autopar.errors import VerificationError
from autopar.ir.batch import call_model, flatten
from autopar.ir.build import named_parameters
from autopar.ir.capture import find_loss
from autopar.ops.fragments import Fragment
from autopar.runtime.servers import serve_here
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from autopar.spec.topology import Topology

Factory = Callable[[], tuple[Any, ...]]
"""Returns `(model, example_inputs)` or `(model, example_inputs, loss_fn)`; must be importable by other processes."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

TOLERANCE = {"float64": 1e-10, "float32": 2e-4}
"""Largest difference, relative to the largest value of the tensor or to 1. [Empirical for float32: ten AdamW steps.]"""
ROUNDED_TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
"""For gradients with 16 bits on the wire: each is rounded once, and each partial sum once (unit roundoff 2^-9, 2^-12;
a ring of up to 8 ranks)."""
_PATIENCE_S = 600.0
IMPORTED_ONCE = ["torch._dynamo", "torch._functorch.aot_autograd", "autopar.api"]


@dataclass(frozen=True)
class StepDifference:
    """The largest differences after one step, over all ranks."""

    step: int
    loss: float
    gradient: float
    parameter: float
    worst: str
    """The parameter whose gradient or value differs most."""


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    world_size: int
    dtype: str
    tolerance: float
    steps: tuple[StepDifference, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(max(s.loss, s.gradient, s.parameter) <= self.tolerance for s in self.steps)

    def raise_if_failed(self) -> None:
        """Raises `VerificationError` with the first step that differs."""
        for s in self.steps:
            if max(s.loss, s.gradient, s.parameter) > self.tolerance:
                raise VerificationError(
                    f"step {s.step}: the distributed program differs from one process by {s.loss:.2e} in the loss, "
                    f"{s.gradient:.2e} in gradients and {s.parameter:.2e} in parameters (most in '{s.worst}'); allowed "
                    f"{self.tolerance:.2e} in {self.dtype}"
                )


@dataclass(frozen=True)
class Job:
    """What every process of a verification is told."""

    make: Factory
    folder: str
    world_size: int
    steps: int
    dtype: str
    samples: tuple[int, ...]
    plan: str | None
    strategy: str | None
    make_optimizer: OptimizerFactory
    clip_grad_norm: float | None
    micro_batches: int
    seed: int
    port: int
    settings: dict[str, Any] = field(default_factory=dict)


def sgd_with_momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer of a verification: one with state, and no normalization that would hide an error."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def verify(
    make: Factory,
    *,
    plan: Plan | None = None,
    strategy: str | None = None,
    world_size: int | None = None,
    steps: int = 5,
    dtype: str = "float64",
    samples: tuple[int, ...] | None = None,
    make_optimizer: OptimizerFactory = sgd_with_momentum,
    clip_grad_norm: float | None = None,
    micro_batches: int = 1,
    tolerance: float | None = None,
    seed: int = 0,
    **settings: Any,
) -> Verification:
    """Compares `world_size` gloo ranks with one process over several optimizer steps.

    `samples`: how many samples each rank's batches have; by default unequal ones, as equal ones hide errors of
    weighting. Batches are drawn from the rows of the example inputs. `settings` go to `autopar.optimize`.
    """
    n = world_size or (plan.cluster.world_size if plan is not None else 4)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        job = Job(
            make,
            folder,
            n,
            steps,
            dtype,
            samples or tuple(2 + r % 2 for r in range(n)),
            None if plan is None else _in_dtype(plan, dtype).model_dump_json(),
            strategy,
            make_optimizer,
            clip_grad_norm,
            micro_batches,
            seed,
            _free_port(),
            settings,
        )
        context: Any = start_processes(  # type: ignore[no-untyped-call]
            _process, (job,), nprocs=n + 1, join=False, start_method=start_method()
        )
        try:
            while not context.join(timeout=1.0):
                pass
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        found = [json.loads((Path(folder) / f"rank{r}.json").read_text()) for r in range(n)]
    rows = tuple(_worst([StepDifference(**f["steps"][s]) for f in found]) for s in range(steps))
    limit = tolerance if tolerance is not None else found[0]["tolerance"]
    return Verification(n, dtype, limit, rows, tuple(found[0]["notes"]))


def start_method() -> str:
    """How processes are started: forked from one that has imported torch and nothing more, as that takes each of them
    seconds; where there is no fork, spawned."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    return "forkserver"


def _in_dtype(plan: Plan, dtype: str) -> Plan:
    """The plan for the same model in the dtype of the verification."""
    specs = [p.model_copy(update={"dtype": dtype}) if "float" in p.dtype else p for p in plan.model.parameters]
    return plan.model_copy(update={"model": plan.model.model_copy(update={"parameters": tuple(specs)})})


def _worst(rows: list[StepDifference]) -> StepDifference:
    most = max(rows, key=lambda r: max(r.gradient, r.parameter))
    return StepDifference(
        most.step, max(r.loss for r in rows), max(r.gradient for r in rows), max(r.parameter for r in rows), most.worst
    )


def _process(index: int, job: Job) -> None:
    torch.set_num_threads(1)
    if index == job.world_size:
        _reference(job)
    else:
        _rank(index, job)


def _build(job: Job) -> tuple[nn.Module, Any, Any, torch.optim.Optimizer]:
    torch.manual_seed(job.seed)
    model, example, *rest = job.make()
    model = model.to(getattr(torch, job.dtype)).train()
    without_dropout(model)
    loss_fn = rest[0] if rest else None
    parameters = [p for p in {id(p): p for p in named_parameters(model, loss_fn).values()}.values() if p.requires_grad]
    return model, example, loss_fn, job.make_optimizer(parameters)


def without_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of a model to 0, in modules and in the attributes that layers keep it in."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)


def batch_for(example: Any, step: int, rank: int, samples: int, seed: int, dtype: str) -> Any:
    """Rank `rank`'s batch of a step: rows of the example, drawn at random."""
    batch = flatten(example)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    rows = torch.randint(0, batch.size or 1, (samples,), generator=generator)
    width = batch.size
    drawn = tuple((t.index_select(0, rows) if t.dim() and t.shape[0] == width else t) for t in batch.tensors)
    return batch.rebuild(tuple(t.to(getattr(torch, dtype)) if t.is_floating_point() else t for t in drawn))


def _batches(job: Job, example: Any, step: int, rank: int) -> list[Any]:
    k = job.micro_batches
    return [batch_for(example, step * k + i, rank, job.samples[rank], job.seed, job.dtype) for i in range(k)]


def _reference(job: Job) -> None:
    model, example, loss_fn, optimizer = _build(job)
    names = named_parameters(model, loss_fn)
    local = bool(_batch_norms(model)) and job.settings.get("batch_norm", "local") == "local"
    for step in range(job.steps):
        batches = [b for r in range(job.world_size) for b in _batches(job, example, step, r)]
        optimizer.zero_grad()
        loss = _shard_by_shard(model, loss_fn, batches) if local else _loss(model, loss_fn, _concatenated(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        if job.clip_grad_norm is not None:
            once = {id(p): p for p in names.values() if p.grad is not None}  # a tied parameter has several names
            torch.nn.utils.clip_grad_norm_(list(once.values()), job.clip_grad_norm)
        gradients = {n: p.grad for n, p in names.items() if p.grad is not None}
        optimizer.step()
        values = {
            "loss": loss.detach(),
            "gradients": gradients,
            "parameters": {n: p.detach() for n, p in names.items()},
        }
        path = Path(job.folder) / f"step{step}.pt"
        torch.save(values, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        done = [Path(job.folder) / f"done{step}.{r}" for r in range(job.world_size)]
        _wait_for(lambda done=done: all(d.exists() for d in done))  # type: ignore[misc]
        path.unlink()


def _loss(model: nn.Module, loss_fn: Any, batch: Any) -> torch.Tensor:
    output, target = call_model(model, batch, loss_fn is not None)
    return find_loss(output if loss_fn is None else loss_fn(output, target))  # type: ignore[no-any-return]


def _concatenated(batches: list[Any]) -> Any:
    flat = [flatten(b) for b in batches]
    size = flat[0].size
    columns = zip(*(f.tensors for f in flat), strict=True)
    joined = tuple(torch.cat(c) if c[0].dim() and c[0].shape[0] == size else c[0] for c in columns)
    return flat[0].rebuild(joined)


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]


def _shard_by_shard(model: nn.Module, loss_fn: Any, batches: list[Any]) -> torch.Tensor:
    """The loss where each rank normalizes over its own batch; the running statistics are those of the first."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    total = torch.zeros((), dtype=torch.float64)
    samples = [flatten(b).size or 1 for b in batches]
    after: dict[str, torch.Tensor] = {}
    for batch, count in zip(batches, samples, strict=True):
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        total = total + _loss(model, loss_fn, batch) * (count / sum(samples))
        after = after or {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name])
    return total


def _rank(rank: int, job: Job) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    if job.world_size > 1:
        dist.init_process_group("gloo")
    model, example, loss_fn, optimizer = _build(job)
    plan = None if job.plan is None else Plan.loads(job.plan)
    if plan is not None and job.world_size > 1 and rank == 0:
        serve_here(Topology(plan.cluster.cluster).servers)
    program = optimize(
        model,
        ClusterSpec.local(job.world_size) if plan is None else None,
        example_inputs=_batches(job, example, 0, rank)[0],
        loss_fn=loss_fn,
        optimizer=optimizer,
        plan=plan,
        strategy=job.strategy,
        clip_grad_norm=job.clip_grad_norm,
        **{"late_parameters": True, **job.settings},  # parameters are compared once they are there
    )
    seen: list[tuple[Fragment, torch.Tensor]] = []
    program.observe(lambda fragment, gradient: seen.append((fragment, gradient.clone())))
    rows = []
    for step in range(job.steps):
        batches = _batches(job, example, step, rank)
        seen.clear()
        loss = program.step(micro_batches=batches) if len(batches) > 1 else program.step(batches[0])
        with program.gathered():
            rows.append(_compare(job, step, rank, loss, seen, named_parameters(model, loss_fn)))
    notes = ["dropout is off"]
    if _batch_norms(model) and job.settings.get("batch_norm", "local") == "local":
        notes.append("batch norm: the single process normalizes over each rank's batch, as the ranks do")
    wires = {str(g.options.get("wire", "same")) for g in program.plan.groups} & ROUNDED_TOLERANCE.keys()
    limit = max((ROUNDED_TOLERANCE[w] for w in wires), default=TOLERANCE.get(job.dtype, 1e-2))
    found = {"steps": [asdict(r) for r in rows], "tolerance": limit, "notes": notes}
    (Path(job.folder) / f"rank{rank}.json").write_text(json.dumps(found))
    if job.world_size > 1:
        dist.destroy_process_group()


def _compare(
    job: Job, step: int, rank: int, loss: torch.Tensor, seen: list[tuple[Fragment, torch.Tensor]], names: dict[str, Any]
) -> StepDifference:
    path = Path(job.folder) / f"step{step}.pt"
    _wait_for(path.exists)
    reference = torch.load(path, weights_only=True)
    (Path(job.folder) / f"done{step}.{rank}").touch()
    gradients = {f.name: _difference(g, f.cut(reference["gradients"][f.name])) for f, g in seen}
    values = {n: _difference(p.detach(), reference["parameters"][n]) for n, p in names.items()}
    worst = max({**values, **{k: max(v, values[k]) for k, v in gradients.items()}}.items(), key=lambda x: x[1])[0]
    return StepDifference(
        step, _difference(loss, reference["loss"]), max(gradients.values(), default=0.0), max(values.values()), worst
    )


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    worst = float((a.double() - b.double()).abs().max()) / scale if b.numel() else 0.0
    return worst if worst == worst else float("inf")


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise VerificationError("a process of the verification did not come forward in time")
        time.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
