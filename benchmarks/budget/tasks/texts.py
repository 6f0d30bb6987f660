"""Bytes of the sources of Python's standard library, which every installation has: the last tenth of the files is the
test set."""

from __future__ import annotations

import sysconfig
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.budget.metrics import NATS
from benchmarks.budget.task import Batch, Task
from benchmarks.zoo.workload import adamw

SYMBOLS = 128
"""Bytes above are left out."""
MOST_BYTES = 6 << 20


@cache
def _bytes() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and to test on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("[a-s]*/*.py"))
    text = np.concatenate([np.frombuffer(f.read_bytes(), np.uint8) for f in files if "site-packages" not in f.parts])
    # Files in an order that has nothing to do with their names, in pieces of 4 KiB.
    pieces = text[: min(len(text), MOST_BYTES) // 4096 * 4096].reshape(-1, 4096)
    pieces = pieces[np.random.default_rng(3).permutation(len(pieces))]
    tested = len(pieces) // 10
    return _plain(pieces[tested:]), _plain(pieces[:tested])


def _plain(pieces: np.ndarray) -> np.ndarray:
    flat = pieces.ravel()
    return flat[flat < SYMBOLS]


def windows(generator: torch.Generator, samples: int, length: int, test: bool = False) -> Batch:
    """Bytes (samples, length), and those that come next."""
    text = _bytes()[test]
    starts = torch.randint(len(text) - length - 1, (samples,), generator=generator).numpy()
    rows = torch.from_numpy(np.stack([text[s : s + length + 1] for s in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def next_byte(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """An LSTM over embedded bytes."""

    def __init__(self, width: int = 128, symbols: int = SYMBOLS) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width // 2)
        self.cells = nn.LSTM(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.cells(self.embed(ids))[0])
        return scores


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        passed: torch.Tensor = self.mlp(self.between(x))
        return x + passed


class Transformer(nn.Module):
    """A decoder of a few blocks."""

    def __init__(self, width: int = 96, layers: int = 2, symbols: int = SYMBOLS, length: int = 64) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(symbols, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.norm(self.blocks(self.embed(ids) + self.places)))
        return scores


TASKS = (
    Task(
        name="bytes_lstm",
        about="a byte-level LSTM on Python's own sources; AdamW",
        role="judged",
        model=Recurrent,
        batch=partial(windows, length=32),
        test_batch=partial(windows, length=32, test=True),
        loss_fn=next_byte,
        optimizer=adamw(4e-3),
        steps=1_000,
        ranks=4,
        rank_samples=8,
        metric=NATS,
        test_samples=8_000,
    ),
    Task(
        name="bytes_transformer",
        about="a byte-level transformer on Python's own sources; AdamW",
        role="judged",
        model=Transformer,
        batch=partial(windows, length=64),
        test_batch=partial(windows, length=64, test=True),
        loss_fn=next_byte,
        optimizer=adamw(3e-3),
        steps=1_000,
        ranks=2,
        rank_samples=8,
        metric=NATS,
        test_samples=4_000,
    ),
)
