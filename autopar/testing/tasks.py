"""Small models that have all that a strategy may meet: tied weights, tables, bags, heads, classes that do not count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.testing import classes, lookups

Batch = tuple[Any, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss."""

    name: str
    model: Callable[[], nn.Module]
    """In float64 and training mode, the same on every call."""
    batch: Callable[[int, int], Any]
    """Inputs and target, by the number of samples and a seed."""
    loss_fn: Any
    weight: Callable[[torch.Tensor], float] = len
    """From a target to what the loss is a mean over."""


class _Dense(nn.Module):
    """Linear layers with and without bias, one used twice, and normalization; sizes that no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 11), nn.LayerNorm(11)
        self.twice, self.last = nn.Linear(11, 11, bias=False), nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.twice(self.norm(torch.tanh(self.first(x)))))
        scores: torch.Tensor = self.last(torch.tanh(self.twice(hidden)))
        return scores


class _Tied(nn.Module):
    """A table of words that is also the head's weight."""

    def __init__(self, words: int = 31, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.inner(self.table(words))))
        return scores


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    """Builds the same model on every call, in training mode; others' random numbers stay what they are."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return make().to(dtype).train()

    return build


def _vectors(samples: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(samples, n, generator=draw, dtype=torch.float64) for n in (5, 3))  # type: ignore[return-value]


TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        Task("dense", seeded(_Dense), _vectors, F.mse_loss),
        Task("tables", seeded(lookups.Lookups), lookups.batch, F.mse_loss),
        Task(
            "classes",
            seeded(lambda: classes.Classes(13, bias=True)),
            lambda n, s: classes.batch(n, s, 13),
            classes.loss,
            classes.weight,
        ),
        Task("tied", seeded(_Tied), lambda n, s: classes.batch(n, s, 31), classes.loss, classes.weight),
    )
}
