"""What plain PyTorch makes of a model: steps on the mean of the ranks' losses, in one process."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from benchmarks.zoo.entry import Entry

STEPS = 2
RATE, MOMENTUM = 0.1, 0.9
EXACT = 1e-9
"""Relative difference of two updates that needs no explanation in float64."""
ROUNDINGS = 30.0
"""A larger difference is rounding where it is at most so many times what a rounding of all parameters in float32
makes: many models compute attention, norms or routing in float32, whatever their parameters are in."""

Tree = dict[str, torch.Tensor]
See = Callable[[list[float]], list[float]]


@dataclass(frozen=True)
class Trained:
    """A few steps of training."""

    updates: list[Tree]
    """After each step, by how much each parameter has moved from where it began, in float64."""
    losses: list[list[float]]
    """Of each step, each rank's."""
    eps: float = EXACT
    """Of the loss's dtype, in which the mean over the ranks is taken, but at least `EXACT`."""

    def digest(self) -> bytes:
        """Of every bit of it, 32 bytes."""
        found = hashlib.sha256(repr(self.losses).encode())
        for update in self.updates:
            for name, values in update.items():
                found.update(name.encode())
                found.update(values.reshape(-1).view(torch.uint8).numpy().data)
        return found.digest()

    def seen(self, see: See) -> Trained:
        """With the losses that `see` makes of all ranks'."""
        return replace(self, losses=[see(losses) for losses in self.losses])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: an update that is in proportion to the gradient, and a state that is kept."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM)


def batch_of(entry: Entry, step: int, rank: int, dtype: torch.dtype) -> Any:
    """A rank's batch of a step, its floating-point tensors in `dtype`."""
    batch = entry.batch(entry.batch_size, 1000 + 10 * step + rank)
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, batch)


def values_of(model: nn.Module) -> Tree:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def moved(values: Tree, start: Tree) -> Tree:
    """Updates, in float64."""
    return {n: v.double() - start[n].double() for n, v in values.items()}


def train(entry: Entry, model: nn.Module, world_size: int, dtype: torch.dtype, rounding: int = 0) -> Trained:
    """Trains a copy. `rounding`: unless 0, a seed by which parameters begin a rounding in float32 off."""
    model = copy.deepcopy(model)
    if rounding:
        _round(model, rounding)
    start, optimizer, found = values_of(model), optimizer_of(model), Trained([], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        kept: Tree = {}
        of_ranks = []
        for rank in range(world_size):
            if rank == 1:
                kept = {n: b.clone() for n, b in model.named_buffers()}
            if rank:
                fill(model.named_buffers(), buffers)
            torch.manual_seed(step)
            loss = entry.loss(model, batch_of(entry, step, rank, dtype))
            (loss / world_size).backward()  # type: ignore[no-untyped-call]
            of_ranks.append(loss.item())
            found = replace(found, eps=max(EXACT, torch.finfo(loss.dtype).eps))
        fill(model.named_buffers(), kept)  # every rank begins a step with the same buffers, and rank 0's stay
        optimizer.step()
        found.losses.append(of_ranks)
        found.updates.append(moved(values_of(model), start))
    return found


def fill(tensors: Iterable[tuple[str, torch.Tensor]], values: Mapping[str, torch.Tensor]) -> None:
    """Writes values into tensors, by name, but where a shape has changed."""
    with torch.no_grad():
        for name, tensor in tensors:
            if name in values and values[name].shape == tensor.shape:
                tensor.copy_(values[name])


def _round(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            signs = torch.randint(-1, 2, p.shape, generator=draw).double()
            p.copy_(p.double() * (1 + torch.finfo(torch.float32).eps * signs))  # half of it would round away in float32


@dataclass
class Judge:
    """Compares trainings of a model with the reference."""

    entry: Entry
    model: nn.Module
    """With its values to begin with."""
    world_size: int
    dtype: torch.dtype
    expected: Trained
    _disturbed: list[Trained] = field(default_factory=list)

    def worst(self, found: Trained, see: See = list) -> tuple[float, str]:
        """The largest relative difference of an update or a loss; and where it is, empty where rounding explains it.
        `see`: which losses are `found`'s, of all ranks'."""
        errors = self._errors(found, see)
        exact = dict.fromkeys(errors, EXACT) | {f"step {i}: the loss": self.expected.eps for i in range(STEPS)}
        large = [(size, where) for where, size in errors.items() if not size <= exact[where]]
        for size, where in sorted(large, reverse=True):
            least = (
                torch.finfo(torch.float32).eps if where.endswith("the loss") else 0.0
            )  # a loss may be one in float32
            sizes = (self._errors(d.seen(see), see)[where] for d in self._roundings())
            explained = ROUNDINGS * max(sizes) + 4 * least
            if size > explained:
                return size, f"{where} is off by {size:.1e}, of which rounding explains {explained:.1e}"
        return max(errors.values()), ""

    def _errors(self, found: Trained, see: See) -> dict[str, float]:
        """By what, relative to the size of each update, or of the loss. Updates that are nothing beside the others', as
        of a key's bias, which softmax cancels, count as a millionth of those."""
        errors: dict[str, float] = {}
        for step, (mine, theirs) in enumerate(zip(found.updates, self.expected.updates, strict=True)):
            typical = max((_rms(u) for u in theirs.values()), default=0.0)
            for n, p in self.model.named_parameters():
                difference, own = _rms(mine[n] - theirs[n]), _rms(p.detach())
                size = difference / max(_rms(theirs[n]), 1e-6 * typical, 1e-300)
                if difference <= _floor(p, own):
                    size = 0.0
                errors[f"step {step}: the update of '{n}'"] = _number(size)
        expected = self.expected.seen(see)
        for step, (losses, wanted) in enumerate(zip(found.losses, expected.losses, strict=True)):
            sizes = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, wanted, strict=True)]
            errors[f"step {step}: the loss"] = max(map(_number, sizes))
        return errors

    def _roundings(self) -> list[Trained]:
        """Trainings from parameters that are a rounding off."""
        if not self._disturbed:
            self._disturbed += [train(self.entry, self.model, self.world_size, self.dtype, s) for s in (1, 2)]
        return self._disturbed


def _floor(parameter: torch.Tensor, own: float) -> float:
    """A difference below this is rounding of the parameter itself, of this size."""
    return torch.finfo(torch.float32).eps * own if parameter.dtype is torch.float32 else 1e-14 * (own + 1)


def _rms(t: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(t.double())) / math.sqrt(max(t.numel(), 1))


def _number(size: float) -> float:
    return math.inf if math.isnan(size) else size
