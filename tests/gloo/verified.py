"""What `test_verification` verifies, and the faults that it plants in the ranks; the single process has none."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime import base_program

Made = tuple[nn.Module, Any, Any]


class Statistics(nn.Module):
    """Buffers of every kind: read and written, written only, neither, running statistics, expanded memory."""

    mean: torch.Tensor
    seen: torch.Tensor
    steps: torch.Tensor
    last: torch.Tensor
    positions: torch.Tensor

    def __init__(self, counts: int = 1) -> None:
        super().__init__()
        self.counts = counts
        self.first, self.last_layer = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("positions", torch.arange(3).expand((2, -1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen += self.counts * x.shape[0]
        self.last.copy_(x.detach().mean(0))
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        h = torch.tanh(self.norms[0](self.first(x - self.mean)))
        scores: torch.Tensor = self.last_layer(self.norms[1](h)) + self.positions[0]
        return scores


def statistics(counts: int = 1) -> Made:
    return Statistics(counts), (torch.randn(12, 4), torch.randint(0, 3, (12,))), F.cross_entropy


def unshared() -> Made:
    """Moving averages stay each rank's own."""
    if _is_a_rank():
        vars(base_program)["take_from_rank_0"] = lambda *_: None
    return statistics()


def miscounted() -> Made:
    """Ranks count every sample twice."""
    return statistics(counts=2 if _is_a_rank() else 1)


def sixteen_bits() -> tuple[nn.Sequential, Any, Any]:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).bfloat16()
    return model, (torch.randn(16, 8).bfloat16(), torch.randint(0, 3, (16,))), F.cross_entropy


class Doubles(nn.Linear):
    """Returns twice what it should where it computes in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.dtype.itemsize == 2 else y


def wrong_in_sixteen_bits() -> Made:
    """Ranks compute otherwise, in 16 bits alone."""
    model, batch, loss_fn = sixteen_bits()
    if _is_a_rank():
        model[2].__class__ = Doubles
    return model, batch, loss_fn


def _is_a_rank() -> bool:
    return "RANK" in os.environ
