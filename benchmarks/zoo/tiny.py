"""Workloads of a few thousand parameters: to see that every peer trains, not how fast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo.workload import SEED, Workload, adamw, seeded, sgd

ROWS, WIDTH, CLASSES, SAMPLES = 50, 16, 7, 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.back(F.gelu(self.wide(self.norm(x))))
        return out


class _Words(nn.Module):
    """An embedding, two blocks, and a head with an odd number of classes, which does not divide by the ranks."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    ids = torch.randint(0, ROWS, (SAMPLES, 5), generator=generator)
    return ids, ids.sum(1) % CLASSES


TINY: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            name="tiny",
            about="An embedding, two blocks and a head; random ids, and the sum of a sample's ids to be found.",
            model=seeded(lambda: _Words(sparse=False)),
            batch=_batch,
            loss_fn=F.cross_entropy,
            optimizer=sgd(0.1),
            sparse_model=seeded(lambda: _Words(sparse=True)),
        ),
        Workload(
            name="tiny-adamw",
            about="The same with AdamW, which has state to be sharded.",
            model=seeded(lambda: _Words(sparse=False)),
            batch=_batch,
            loss_fn=F.cross_entropy,
            optimizer=adamw(1e-2),
        ),
    )
}
