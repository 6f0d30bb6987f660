"""A model of gradients that have structure, in all the ways in which they come."""

from __future__ import annotations

import torch
from torch import nn

ROWS = 97
"""A prime number, so that no world size divides it."""
WORDS, OUT = 5, 3


class Lookups(nn.Module):
    """Tables used twice, with padding, as bags that sum and bags that average; linear layers used twice, turned over
    and over three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 8, padding_idx=0)
        self.small = nn.Embedding(7, 8)
        self.sums = nn.EmbeddingBag(ROWS, 8, mode="sum")
        self.means = nn.EmbeddingBag(ROWS, 8, mode="mean", padding_idx=None)
        self.twice = nn.Linear(8, 8)
        self.turned = nn.Parameter(torch.randn(8, 6) / 4)
        self.out = nn.Linear(6, OUT)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        n = len(words)
        offsets = torch.arange(0, n * WORDS, WORDS, device=words.device)
        flat = words.reshape(-1)
        x = self.table(words) + self.table((words * 3) % ROWS) + self.small(words % 7)
        x = self.twice(torch.tanh(self.twice(x)))
        pooled = x.mean(1) + self.sums(flat, offsets) + self.means(flat, offsets)
        scores: torch.Tensor = self.out(torch.tanh(pooled @ self.turned))
        return scores


def batch(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of which some are padding; every third batch looks one word up only."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, ROWS, (samples, WORDS), generator=draw)
    if seed % 3 == 0:
        words.fill_(11)
    return words, torch.randn(samples, OUT, generator=draw, dtype=torch.float64)
