"""A model with a head: scores of words over classes that no number of ranks divides, or that are fewer than ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 5
IGNORED = -100


class Classes(nn.Module):
    """Words to scores over classes, through a linear layer with or without a bias."""

    def __init__(self, classes: int, bias: bool) -> None:
        super().__init__()
        self.classes = classes
        self.table = nn.Embedding(31, 6)
        self.inner = nn.Linear(6, 7)
        self.head = nn.Linear(7, classes, bias=bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.tanh(self.inner(self.table(words))))
        return scores


def batch(samples: int, seed: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and their classes, of which some do not count, in some batches none do, and in others all are one class."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 31, (samples, WORDS), generator=draw)
    target = torch.randint(0, classes, (samples, WORDS), generator=draw)
    target[0, : seed % 4] = IGNORED
    if seed % 7 == 1:
        target.fill_(IGNORED)
    if seed % 5 == 0:
        target.fill_(classes - 1)
    return words, target


def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), target.reshape(-1))


def smoothed_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), target.reshape(-1), label_smoothing=0.1)


def weight(target: torch.Tensor) -> float:
    """How many targets count."""
    return float((target != IGNORED).sum())
