"""Clicks of users on items, drawn from a planted teacher: tables of embeddings whose rows come as often as words do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.budget.metrics import LOG_LOSS
from benchmarks.budget.task import Batch, Task
from benchmarks.zoo.workload import adamw

TABLES, ROWS, DENSE, WIDTH = 6, 2_000, 8, 16


def _teacher(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(TABLES, rows, 4, generator=generator), torch.randn(DENSE, generator=generator)


def chances(generator: torch.Generator, samples: int, rows: int = ROWS) -> Batch:
    """Row numbers (samples, tables), numbers (samples, 8); how likely a click is. Row k comes about as often as
    1 / k."""
    ids = (rows ** torch.rand(samples, TABLES, generator=generator)).long().clamp(1, rows) - 1
    numbers = torch.randn(samples, DENSE, generator=generator)
    table, weights = _teacher(rows)
    drawn = torch.stack([table[t, ids[:, t]] for t in range(TABLES)], 1)  # (samples, tables, 4)
    pairs = (drawn[:, :3] * drawn[:, 3:]).sum((1, 2))
    return (ids, numbers), (0.8 * pairs + drawn[..., 0].sum(1) + numbers @ weights - 1).sigmoid()


def clicks(generator: torch.Generator, samples: int) -> Batch:
    """The same; whether they clicked."""
    inputs, chance = chances(generator, samples)
    return inputs, (torch.rand(samples, generator=generator) < chance).float()


class Recommender(nn.Module):
    """Products of embeddings and of a bottom net, into a top net (Naumov et al., "DLRM", 2019)."""

    def __init__(self, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, width))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        rows = torch.stack([dense, *(table(ids[:, t]) for t, table in enumerate(self.tables))], 1)
        products = rows @ rows.transpose(1, 2)
        left, right = torch.triu_indices(TABLES + 1, TABLES + 1, 1)
        scores: torch.Tensor = self.top(torch.cat([dense, products[:, left, right]], 1))
        return scores[:, 0]


TASKS = (
    Task(
        name="clicks",
        about="a DLRM of six tables on a planted teacher's clicks; AdamW",
        role="judged",
        model=Recommender,
        batch=clicks,
        test_batch=chances,
        loss_fn=F.binary_cross_entropy_with_logits,
        optimizer=adamw(4e-3),
        steps=1_500,
        ranks=4,
        rank_samples=64,
        metric=LOG_LOSS,
        test_samples=100_000,
    ),
)
