"""Identities, each a point in a hidden space, seen through a fixed random net and noise: a head with as many classes as
there are identities, as face recognition has."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.budget.metrics import ERROR
from benchmarks.budget.task import Batch, Task
from benchmarks.zoo.workload import sgd

IDENTITIES, HIDDEN, SEEN = 1_000, 12, 64


@cache
def _world() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(23)
    people = torch.randn(IDENTITIES, HIDDEN, generator=generator)
    first = torch.randn(HIDDEN, 48, generator=generator) / HIDDEN**0.5
    second = torch.randn(48, SEEN, generator=generator) / 48**0.5
    return people, first, second


def faces(generator: torch.Generator, samples: int) -> Batch:
    """What is seen (samples, 64), and whose it is."""
    people, first, second = _world()
    target = torch.randint(IDENTITIES, (samples,), generator=generator)
    hidden = people[target] + 0.35 * torch.randn(samples, HIDDEN, generator=generator)
    seen = torch.tanh(2 * hidden @ first) @ second
    return seen + 0.1 * torch.randn(samples, SEEN, generator=generator), target


class Face(nn.Module):
    """An embedding of length 1, compared with one for each class (normalised softmax, scale 16)."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(SEEN, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, width)
        )
        self.head = nn.Parameter(torch.randn(IDENTITIES, width) / width**0.5)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return 16 * F.normalize(self.body(seen)) @ F.normalize(self.head).t()


TASKS = (
    Task(
        name="faces",
        about="an embedding net and a head of 1,000 identities; SGD with momentum",
        role="judged",
        model=Face,
        batch=faces,
        loss_fn=F.cross_entropy,
        optimizer=sgd(0.3, 0.9, 1e-5),
        steps=1_500,
        ranks=8,
        rank_samples=16,
        metric=ERROR,
    ),
)
