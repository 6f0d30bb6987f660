"""Training under a plan, and the same training in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autopar.ir.batch import call_model
from autopar.runtime.program import Program
from autopar.testing.tasks import Task


@dataclass(frozen=True)
class Training:
    """How parameters are updated."""

    optimizer: Callable[[Any], torch.optim.Optimizer]
    clip: float | None = None
    micro_batches: int = 1


LEARNING_RATE = 0.05
"""Of SGD."""
TRAININGS: dict[str, Training] = {
    "sgd": Training(lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=0.9)),
    "adamw": Training(lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "clipped": Training(lambda p: torch.optim.AdamW(p, lr=1e-3), clip=0.05),
    "plain": Training(lambda p: torch.optim.SGD(p, lr=LEARNING_RATE)),
    "accumulated": Training(lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=0.9), micro_batches=2),
}
SAMPLES = {"equal": (2, 2, 2, 2, 2), "unequal": (3, 1, 4, 2, 1)}
"""Of each rank's batches."""


def batches(task: Task, training: str, samples: str, step: int, rank: int) -> list[Any]:
    """A rank's micro-batches of a step."""
    count = TRAININGS[training].micro_batches
    return [task.batch(SAMPLES[samples][rank], 1000 * step + 10 * rank + i) for i in range(count)]


@cache
def reference(
    task: Task, training: str, samples: str, world_size: int, steps: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Training in one eager process: parameters after the last step, and the loss of every step.

    Each rank's batch goes through the model for itself, weighted by what its loss is a mean over. That is the global
    batch's mean, and leaves batch normalization to each rank's batch, as documented.
    """
    model, how = task.model(), TRAININGS[training]
    optimizer = how.optimizer(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(_backward(model, task, training, samples, step, world_size))
        if how.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}, losses


def gradients(
    task: Task, training: str, samples: str, world_size: int, step: int, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients of a step, in one eager process, at these values of the parameters."""
    model = task.model()
    model.load_state_dict(dict(parameters), strict=False)
    _backward(model, task, training, samples, step, world_size)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def _backward(model: torch.nn.Module, task: Task, training: str, samples: str, step: int, world_size: int) -> float:
    """Adds the gradients of all ranks' batches to the parameters'; returns the loss."""
    parts = [b for r in range(world_size) for b in batches(task, training, samples, step, r)]
    weights = [task.weight(b[1]) for b in parts]
    total = 0.0
    for part, weight in zip(parts, weights, strict=True):
        output, target = call_model(model, part, True)
        if weight == 0:  # a mean over nothing
            continue
        loss = task.loss_fn(output, target) * (weight / sum(weights))
        loss.backward()
        total += loss.item()
    return total


@dataclass(frozen=True)
class Outcome:
    """Of training under a plan, on one rank."""

    losses: tuple[float, ...]
    parameters: dict[str, torch.Tensor]
    """After the last step, whole."""

    @property
    def digest(self) -> str:
        """Of all losses and all bits of the parameters, which all ranks must have alike, or they would drift apart."""
        return digest_of(self.parameters, repr(self.losses))

    def differences(self, task: Task, training: str, samples: str, world_size: int) -> dict[str, float]:
        """The largest differences from one process."""
        expected, losses = reference(task, training, samples, world_size, len(self.losses))
        return {
            "parameters": max(float((p - expected[n]).abs().max()) for n, p in self.parameters.items()),
            "loss": max(abs(a - b) for a, b in zip(self.losses, losses, strict=True)),
        }


def trained(program: Program, task: Task, training: str, samples: str, steps: int) -> Outcome:
    """Trains under a plan."""
    losses = []
    for step in range(steps):
        mine = batches(task, training, samples, step, program.rank)
        loss = program.step(micro_batches=mine) if len(mine) > 1 else program.step(mine[0])
        losses.append(loss.item())
    with program.gathered():
        return Outcome(tuple(losses), {n: p.detach().clone() for n, p in program.model.named_parameters()})


def updated_with(
    state: Mapping[str, Any], before: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What each parameter was updated with in a step, and Adam's first moments behind it; none of SGD.

    Args:
        state: the program's, behind the step.
        before: parameters before it.
        moments: Adam's first moments before it.
    """
    saved = state["optimizer"]
    group = saved["param_groups"][0]
    if "betas" not in group:  # a step of SGD is that, times its rate
        return {n: (p - state["model"][n]) / LEARNING_RATE for n, p in before.items()}, {}
    beta = group["betas"][0]  # it is a part of 1 - beta of Adam's first moment
    after = {n: saved["state"][i]["exp_avg"] for i, n in enumerate(before)}
    return {n: (m - beta * moments.get(n, 0.0)) / (1 - beta) for n, m in after.items()}, after


def digest_of(parameters: Mapping[str, torch.Tensor], also: str = "") -> str:
    """A hash of all bits of the parameters."""
    bits = hashlib.sha256(also.encode())
    for parameter in parameters.values():
        bits.update(parameter.contiguous().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()[:16]
