"""Workloads small enough that four ranks on two cores train them for real in a tenth of a second a step.

They widen the data with other mixtures of compute and parameters than the suite's, and are the ones that trials with
real compute use. Data are random: nothing but the time of a step is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.workload import SEED, Workload, adamw, seeded, sgd

WORDS, CLASSES = 20_000, 100


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (16, 32, 64, 128):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


class _Decoder(nn.Module):
    """A decoder as GPT-2's, with a head of its own."""

    def __init__(self, words: int = 5_000, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), float("-inf")), 1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x).flatten(0, 1)  # type: ignore[no-any-return]


class _Bag(nn.Module):
    """A text classifier: most of it is a table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(ids).mean(1))  # type: ignore[no-any-return]


def _batches(make: Callable[[torch.Generator], Any]) -> Callable[[int, int], Any]:
    def batch(step: int, rank: int) -> Any:
        return make(torch.Generator().manual_seed(SEED + 1000 * step + rank))

    return batch


def _decoded(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 5_000, (2, 33), generator=random)
    return ids[:, :-1].contiguous(), ids[:, 1:].flatten()


_WORKLOADS = (
    Workload(
        name="small-mlp",
        about="Six linear layers of width 512; 32 samples.",
        model=seeded(_mlp),
        batch=_batches(lambda r: (torch.randn(32, 512, generator=r), torch.randn(32, 512, generator=r))),
        loss_fn=F.mse_loss,
        optimizer=sgd(0.01, momentum=0.9),
    ),
    Workload(
        name="small-conv",
        about="Four convolutions with batch normalization, then wide linear layers; 8 pictures of 32 x 32.",
        model=seeded(_convolutions),
        batch=_batches(
            lambda r: (torch.randn(8, 3, 32, 32, generator=r), torch.randint(0, CLASSES, (8,), generator=r))
        ),
        loss_fn=F.cross_entropy,
        optimizer=sgd(0.01, momentum=0.9),
    ),
    Workload(
        name="small-decoder",
        about="A decoder of three layers of width 128 over 5,000 words; 2 sequences of 32.",
        model=seeded(_Decoder),
        batch=_batches(_decoded),
        loss_fn=F.cross_entropy,
        optimizer=adamw(3e-4),
    ),
    Workload(
        name="small-bag",
        about="A mean of word embeddings, 20,000 of width 64, and two linear layers; 32 texts of 24 words.",
        model=seeded(_Bag),
        batch=_batches(
            lambda r: (torch.randint(0, WORDS, (32, 24), generator=r), torch.randint(0, CLASSES, (32,), generator=r))
        ),
        loss_fn=F.cross_entropy,
        optimizer=adamw(1e-3),
    ),
)
SMALL: dict[str, Workload] = {w.name: w for w in _WORKLOADS}
