"""What every process of a verification is told, and the model, the optimizer and the batches that each makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.errors import SpecError
from autopar.ir.batch import flatten
from autopar.ir.build import named_parameters
from autopar.ir.listed import chosen
from autopar.runtime.model.eager import owners_of
from autopar.spec.plan import Plan

Factory = Callable[[], tuple[Any, ...]]
"""Returns `(model, example_inputs)` or `(model, example_inputs, loss_fn)`; must be importable by other processes."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OWN = "own"
"""In place of a dtype: the model is left in the dtypes it was built with."""
_COMPLEX = {"float64": torch.complex128, "float32": torch.complex64}


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
    tolerance: float | None
    seed: int
    port: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """What a process trains."""

    model: nn.Module
    example: Any
    loss_fn: Any
    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]
    """Under every name that each has."""

    @property
    def owners(self) -> dict[str, nn.Module]:
        return owners_of(self.model, self.loss_fn)

    def trainable(self) -> list[nn.Parameter]:
        """Each parameter that trains, once."""
        return _trainable(self.parameters)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer, under every name it has; those of a loss module under `loss_fn.`."""
        each = ((s, *x) for s, o in self.owners.items() for x in o.named_buffers(remove_duplicate=False))
        return {start + name: b for start, name, b in each}


def build(job: Job) -> Built:
    """The model, without dropout, in the dtype of the verification."""
    torch.manual_seed(job.seed)
    model, example, *rest = job.make()
    loss_fn = rest[0] if rest else None
    for owner in owners_of(model, loss_fn).values():
        if job.dtype != OWN:
            owner._apply(lambda t: _converted(t, job.dtype))  # type: ignore[no-untyped-call]
        without_dropout(owner.train())
    named = named_parameters(model, loss_fn)
    return Built(model, example, loss_fn, job.make_optimizer(_trainable(named)), named)


def _trainable(named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in {id(p): p for p in named.values()}.values() if p.requires_grad]


def without_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of a model to 0, in modules and in the attributes that layers keep it in."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)


def plan_in_dtype(plan: Plan, dtype: str) -> Plan:
    """The plan for the same model in the dtype of the verification."""
    if dtype == OWN:
        return plan
    named = {"float": dtype, "complex": str(_COMPLEX[dtype]).removeprefix("torch.")}

    def converted(old: str) -> str:
        return next((new for kind, new in named.items() if kind in old), old)

    specs = [p.model_copy(update={"dtype": converted(p.dtype)}) for p in plan.model.parameters]
    return plan.model_copy(update={"model": plan.model.model_copy(update={"parameters": tuple(specs)})})


def batches(job: Job, example: Any, step: int, rank: int) -> list[Any]:
    """Rank `rank`'s micro-batches of a step."""
    k = job.micro_batches
    return [_drawn(example, step * k + i, rank, job.samples[rank], job.seed, job.dtype) for i in range(k)]


def _drawn(example: Any, step: int, rank: int, samples: int, seed: int, dtype: str) -> Any:
    """Rows of the example, drawn at random."""
    batch = flatten(example)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    rows = torch.randint(0, batch.size or 1, (samples,), generator=generator)
    if batch.listed is not None:
        batch = flatten(chosen(example, batch.listed, rows.tolist()))
        drawn = batch.tensors
    else:
        drawn = tuple(t.index_select(0, rows) if t.dim() and len(t) == batch.size else t for t in batch.tensors)
    return batch.rebuild(tuple(t if dtype == OWN else _converted(t, dtype) for t in drawn))


def _converted(t: torch.Tensor, dtype: str) -> torch.Tensor:
    if t.is_complex():
        return t.to(_COMPLEX[dtype])
    return t.to(getattr(torch, dtype)) if t.is_floating_point() else t


def check_comparable(plan: Plan) -> None:
    """Raises `SpecError` where the plan is lossy, stale or local."""
    if plan.fidelity not in ("exact", "rounded"):
        raise SpecError(
            f"plan '{plan.name}' is '{plan.fidelity}': it does not train as one process does on the global batch, so "
            "there is nothing to compare it with. What its ranks compute before they exchange it is compared on the "
            "first step of every program"
        )
