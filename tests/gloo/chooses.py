"""A model that no graph shows, its batches, and a step of one process on them: what the tests of eager models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar

Batch = tuple[torch.Tensor, torch.Tensor]


class Chooses(nn.Module):
    """Takes one of two layers, or none, by the values in its batch: no graph shows it, and ranks differ in it."""

    def __init__(self, again: bool = False, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.warm, self.cold, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(3, 3)
        self.table = nn.Embedding(20, 8, sparse=sparse)
        self.last = nn.Linear(8, 2)
        self.again = again
        self.calls = 0
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x)
        if x.sum().item() > 0:
            h = checkpoint(self.warm, h, use_reentrant=True) if self.again else self.warm(h)
        elif x.sum().item() < -3:
            h = self.cold(h)
        h = h + self.table((x[:, 0].abs() * 5).long().clamp(max=19))
        self.seen += 1
        found: torch.Tensor = self.last(h.relu())
        return found


def batches(step: int, n: int, each: int) -> list[list[Batch]]:
    """Of every rank: so many micro-batches, of two to four samples, on which the model chooses differently."""
    draw = torch.Generator().manual_seed(step)

    def one(r: int, k: int) -> Batch:
        size = 2 + (r + step + k) % 3
        return torch.randn(size, 4, generator=draw) + (0.5 if (r + k) % 2 else -1.2), torch.randn(
            size, 2, generator=draw
        )

    return [[one(r, k) for k in range(each)] for r in range(n)]


def optimizers(parameters: Any) -> dict[str, torch.optim.Optimizer]:
    listed = list(parameters)
    return {
        "adamw": torch.optim.AdamW(listed, lr=0.01),
        "momentum": torch.optim.SGD(listed, lr=0.1, momentum=0.9, weight_decay=0.01),
    }


def one_process(model: nn.Module, optimizer: torch.optim.Optimizer, of_all: list[Batch], clip: float | None) -> float:
    """A step on all batches together; returns the loss."""
    total = sum(len(x) for x, _ in of_all)
    optimizer.zero_grad()
    loss = sum(nn.functional.mse_loss(model(x), y) * (len(x) / total) for x, y in of_all)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def apart(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def program_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, n: int, **settings: Any) -> Any:
    batch = batches(0, n, 1)[rank][0]
    return autopar.optimize(
        model, example_inputs=batch, loss_fn=nn.functional.mse_loss, optimizer=optimizer, time_budget_s=1, **settings
    )
