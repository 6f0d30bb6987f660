"""A probe: how far a few steps with a plan lead away from where exact training goes, on the user's model and batches.

Exact training goes from parameters x to e in P steps, and on other batches, by chance, to o; with the plan it goes from
x to m on the batches of e. What the probe measures has no unit, and says the same of any method and model:

- `divergence`, |m - e| / |e - x|: how far the plan is off, as a part of the way;
- `lag`, <e - m, e - x> / |e - x|^2: how much of the way it is behind, or, below 0, ahead;
- `noise`, |m - e| / |o - e|: how far it is off, in what chance does anyway;
- `loss_gap`, by how much the loss fell less than in exact training, as a part of what that fell by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autopar.errors import SpecError
from autopar.ir.build import named_parameters
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.quality.copies import copies_of
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.copies import copies
from autopar.runtime.model.evaluated import evaluated
from autopar.runtime.program import Program
from autopar.spec.plan import Plan


@dataclass(frozen=True)
class Probed:
    """What a probe found of one plan; the module says what each figure is. Infinite where numbers were not finite."""

    divergence: float
    lag: float
    noise: float
    loss_gap: float


@dataclass(frozen=True)
class Job:
    """A training job of this rank, to make copies of."""

    model: nn.Module
    optimizer: Optimizer
    settings: Settings
    graph: TrainingGraph
    context: Context
    group: Group
    batch: Any
    """The example that the graph was captured on; batches of other shapes are captured when they come."""
    sizes: tuple[int, ...] = ()
    """Of all ranks' examples, where ranks gather samples."""
    users_loss: Any = None
    """Of a copy, the loss function that its own is a copy of."""

    @classmethod
    def of(cls, program: Program, batch: Any) -> Job:
        """What a program trains, as it is now. `batch`: one that it was made for."""
        settings = program.settings
        return cls(program.model, program.optimizer, settings, program.graph, program.context, program.group, batch)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(named_parameters(self.model, self.settings.loss_fn).values())).device

    def copy(self) -> Job:
        """The same, whose training leaves this one as it is."""
        own = self.settings
        model, optimizer, loss_fn, scaler = copies_of(self.model, self.optimizer, own.loss_fn, own.scaler)
        settings = replace(own, scaler=scaler, loss_fn=loss_fn)
        users_loss = self.users_loss or own.loss_fn
        return replace(self, model=model, optimizer=optimizer, settings=settings, users_loss=users_loss)

    @contextmanager
    def shown_in_users_loss(self) -> Iterator[None]:
        """While it is open, the user's loss, where it is a module, has the values that this copy's has, and is in
        evaluation mode: a metric may read it."""
        theirs, own = self.users_loss, self.settings.loss_fn
        if not (isinstance(theirs, nn.Module) and isinstance(own, nn.Module)):
            yield
            return
        tensors, values = _held(theirs), _held(own)
        put_back = copies(tensors.values())
        with evaluated(theirs, nullcontext()):
            try:
                for name in tensors.keys() & values.keys():
                    tensors[name].copy_(values[name])
                yield
            finally:
                put_back()

    def program(self, plan: Plan) -> Program:
        """A program that trains this job's model. Its first steps are not compared with the model run eagerly, nor its
        times with what was predicted: those of a plan that is taken will be."""
        settings, plan = replace(self.settings, check="never"), plan.model_copy(update={"prediction": None})
        made = Program(self.model, plan, self.group, self.optimizer, settings, self.context)
        made.adopt(self.graph, self.batch, sizes=self.sizes)
        return made

    def means(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in 32 bits or more: the mean over all ranks, whose replicas differ between averages."""
        found = []
        for tensor in tensors:
            value = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            if self.group.world_size > 1:
                dist.all_reduce(value, group=self.group.pg)
                value /= self.group.world_size
            found.append(value)
        return found

    def values(self) -> list[torch.Tensor]:
        """Such means of the parameters."""
        return self.means(named_parameters(self.model, self.settings.loss_fn).values())


class Probe:
    """Exact training of a few steps, with which plans are compared. By all ranks together."""

    def __init__(self, job: Job, exact: Plan, batches: Sequence[Any], steps: int) -> None:
        """`batches`: of this rank, at least twice as many as there are steps; each plan trains on the first half, and
        chance is measured on the second."""
        if len(batches) < 2 * steps:
            raise ValueError(f"{len(batches)} batches for {steps} steps: a probe needs twice as many")
        self._job, self._steps = job, steps
        self._batches = batches[:steps]
        self._start = job.values()
        self._exact, self._losses = self._way(exact, self._batches)
        other, _ = self._way(exact, batches[steps : 2 * steps])
        self._way_squared = _dot(self._exact, self._exact)
        if not self._way_squared:
            rates = sorted({float(g["lr"]) for g in job.optimizer.param_groups if "lr" in g})
            raise SpecError(
                f"the quality budget's probes cannot tell plans apart: {steps} steps of exact training change no "
                f"parameter (learning rates: {rates}). Where a schedule begins at 0, set the rate that training will "
                "have, group['lr'] = ..., for the call of optimize, or make the scheduler behind it"
            )
        self._noise = _distance(other, self._exact)

    def of(self, plan: Plan) -> Probed:
        """Trains a copy with the plan."""
        way, losses = self._way(plan, self._batches)
        distance = _distance(way, self._exact)
        tail = max(1, self._steps // 4)
        fell = sum(self._losses[:tail]) - sum(self._losses[-tail:])
        gap = sum(losses[-tail:]) - sum(self._losses[-tail:])
        if not math.isfinite(distance) or not math.isfinite(gap):
            return Probed(math.inf, math.inf, math.inf, math.inf)
        return Probed(
            divergence=_ratio(distance, math.sqrt(self._way_squared)),
            lag=1 - _ratio(_dot(way, self._exact), self._way_squared),
            noise=_ratio(distance, self._noise),
            loss_gap=_ratio(gap, abs(fell)),
        )

    def _way(self, plan: Plan, batches: Sequence[Any]) -> tuple[list[torch.Tensor], list[float]]:
        """Where the plan leads from the start, and the losses of its steps."""
        job = self._job.copy()
        program = job.program(plan)
        losses = [float(program.step(batch)) for batch in batches]
        with program.gathered():
            return [end - start for end, start in zip(job.values(), self._start, strict=True)], losses


def _held(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _dot(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def _distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.copysign(math.inf, part) if part else 0.0)
