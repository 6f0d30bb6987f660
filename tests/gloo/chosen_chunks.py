"""The algorithms of sparsification, written down for one process with plain loops; and what is trained so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.gloo.training import Batch, Net, batch

DENSITY, CHUNK, MOMENTUM = 0.1, 5, 0.8
METHODS = ("top_k", "random_k", "dgc")


class Idle(Net):
    """With a tied parameter, a frozen one, and one whose gradient is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(23))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(ids)
        return logits + 0.0 * self.idle.sum()


def idle() -> Idle:
    torch.manual_seed(5)
    return Idle().double()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model).values(), lr=lr)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """In two groups, of which one decays weights."""
    matrices = [p for p in trained(model).values() if p.dim() > 1]
    rest = [p for p in trained(model).values() if p.dim() <= 1]
    return torch.optim.SGD([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}], lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model).values(), lr=0.05, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in trained(model).values() if p.dim() > 1]
    rest = [p for p in trained(model).values() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One training."""

    method: str
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    sizes: tuple[int, ...] = (3, 1, 2, 2)
    """Samples of each rank's batches."""
    micro: bool = False
    """Whether steps are of micro-batches, of another number on each rank."""
    max_norm: float | None = None
    schedules: bool = False
    timing: tuple[tuple[str, int], ...] = ()
    """Fields of the plan's groups."""
    ramp: tuple[float, ...] = ()
    """Densities of stages of two steps each, behind `from_step`."""

    @property
    def options(self) -> dict[str, int]:
        """Of the method, beside those that all cases share."""
        return {"ramp": len(self.ramp), "ramp_steps": 2} if self.ramp else {}

    def density(self, step: int) -> float:
        stage = max(0, step - dict(self.timing).get("from_step", 0)) // 2
        return self.ramp[stage] if stage < len(self.ramp) else DENSITY

    def batches(self, step: int, rank: int) -> list[Batch]:
        count = 1 + (rank + step) % 2 if self.micro else 1
        return [batch(10 * step + k, rank, self.sizes[rank]) for k in range(count)]


def cases(method: str, n: int) -> list[Case]:
    plain = method == "dgc"
    clipped = Case(method, decayed if plain else momentum, max_norm=0.05)
    scheduled = Case(method, sgd if plain else adamw, sizes=(2, 2, 2, 2), schedules=True)
    warmed = Case(method, sgd if plain else momentum, micro=True, timing=(("from_step", 3),))
    late = Case(method, sgd, timing=(("delay", 1), ("from_step", 2)))
    if plain:  # a tenth in three stages: its third root, and the square of that
        warmed = replace(warmed, timing=(("from_step", 1),), ramp=(0.46415888, 0.21544347))
        late = replace(late, ramp=(0.46415888, 0.21544347))
    return {1: [warmed, clipped, late], 2: [clipped, warmed], 3: [clipped, late], 4: [scheduled]}[n]


def parts(names: Sequence[str]) -> list[list[str]]:
    """Two groups."""
    return [list(names[::2]), list(names[1::2])]


class Reference:
    """All ranks in one process, with one model, as replicas are alike."""

    def __init__(self, n: int, case: Case) -> None:
        self.n, self.case, self.model = n, case, idle()
        self.optimizer = case.optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.groups = parts(list(trained(self.model)))
        self.rest = [[self._zeros(g) for _ in range(n)] for g in self.groups]
        """Of each group and rank: the residual; of DGC, v."""
        self.grown = [[self._zeros(g) for _ in range(n)] for g in self.groups]
        """Of DGC, u."""
        self.held: list[list[list[torch.Tensor]]] = []
        self.drawn = 0

    def step(self, step: int) -> None:
        timing = dict(self.case.timing)
        delay, first = timing.get("delay", 0), timing.get("from_step", 0)
        given = self._gradients(step)
        if delay and step >= first:
            self.held.append(given)
            if len(self.held) <= delay:
                return
            given = self.held.pop(0)
        plain = step < first
        for g, of_ranks in enumerate(given):
            self._give(self.groups[g], self._sum(g, of_ranks, plain, self.case.density(step)))
        self.drawn += not plain
        if self.case.max_norm is not None:
            nn.utils.clip_grad_norm_(trained(self.model).values(), self.case.max_norm)
        self.optimizer.step()
        if self.case.schedules:
            self.scheduler.step()

    def _sum(self, g: int, of_ranks: list[torch.Tensor], plain: bool, density: float) -> torch.Tensor:
        """What is updated with."""
        if self.case.method == "dgc":
            for rank, gradient in enumerate(of_ranks):
                self.grown[g][rank] = MOMENTUM * self.grown[g][rank] + gradient
            of_ranks = self.grown[g]
        if plain or self.n == 1:
            return torch.stack(of_ranks).sum(0)
        for rank, value in enumerate(of_ranks):
            self.rest[g][rank] = self.rest[g][rank] + value
        elements = len(of_ranks[0])
        spans = [range(a, min(a + CHUNK, elements)) for a in range(0, elements, CHUNK)]
        if self.case.method == "random_k":
            rated = [float(_hash(c ^ _hash(self.drawn))) for c in range(len(spans))]
        else:
            rated = [sum(float(x[i]) ** 2 for x in self.rest[g] for i in span) for span in spans]
        order = sorted(range(len(spans)), key=lambda c: (-rated[c], c))
        total = torch.zeros(elements, dtype=torch.float64)
        for c in order[: math.ceil(density * len(spans))]:
            for i in spans[c]:
                for rank in range(self.n):
                    total[i] += self.rest[g][rank][i]
                    self.rest[g][rank][i] = 0.0
                    self.grown[g][rank][i] = 0.0
        return total

    def _gradients(self, step: int) -> list[list[torch.Tensor]]:
        """Of each group and rank: its part of the gradient of the global mean, flat."""
        each = [self.case.batches(step, r) for r in range(self.n)]
        total = sum(len(b[0]) for of_rank in each for b in of_rank)
        found: list[list[torch.Tensor]] = [[] for _ in self.groups]
        for of_rank in each:
            loss = sum(F.cross_entropy(self.model(ids), to) * (len(ids) / total) for ids, to in of_rank)
            assert isinstance(loss, torch.Tensor)
            own = torch.autograd.grad(loss, list(trained(self.model).values()))
            gradients = dict(zip(trained(self.model), own, strict=True))
            for g, names in enumerate(self.groups):
                found[g].append(torch.cat([gradients[name].reshape(-1) for name in names]))
        return found

    def _give(self, names: Sequence[str], flat: torch.Tensor) -> None:
        start, parameters = 0, trained(self.model)
        for name in names:
            p = parameters[name]
            p.grad = flat[start : start + p.numel()].view(p.shape).clone()
            start += p.numel()

    def _zeros(self, names: Sequence[str]) -> torch.Tensor:
        return torch.zeros(sum(trained(self.model)[name].numel() for name in names), dtype=torch.float64)


def _hash(x: int) -> int:
    for _ in range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) % 2**32
    return (x >> 16) ^ x
