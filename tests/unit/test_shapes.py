"""Batches whose shapes vary: how many captures there are, how long they live, and that each is right."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import SpecError
from autopar.ir.leftovers import _sources
from autopar.runtime.program import Program

VOCABULARY = 19


class Scorer(nn.Module):
    """Scores the next word of each place, from the words so far."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(64, 8)
        self.hidden, self.out = nn.Linear(8, 12), nn.Linear(12, VOCABULARY)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        scores = (h @ h.transpose(1, 2) / ids.shape[1] ** 0.5).masked_fill(~mask, -1e9)
        found: torch.Tensor = self.out(self.drop(torch.tanh(self.hidden(scores.softmax(-1) @ h))))
        return found.flatten(0, 1)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target.flatten())


def batch(samples: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * samples + length + seed)
    return tuple(torch.randint(0, VOCABULARY, (samples, length), generator=draw) for _ in range(2))  # type: ignore[return-value]


class Pair:
    """A program and the same training, eagerly."""

    def __init__(self, net: nn.Module | None = None, example: Any = None, loss: Any = loss_of, **settings: Any) -> None:
        self.net = (net or Scorer()).double()
        self.eager = copy.deepcopy(self.net)
        self.loss = loss
        self.other = torch.optim.AdamW(self.eager.parameters(), lr=0.01)
        self.program: Program = autopar.optimize(
            self.net,
            optimizer=torch.optim.AdamW(self.net.parameters(), lr=0.01),
            loss_fn=loss,
            example_inputs=batch(2, 5) if example is None else example,
            strategy="ddp",
            **settings,
        )

    @property
    def captures(self) -> int:
        return len(list(self.program._compiled))

    def step(self, *batches: Any) -> None:
        """A step of both, on micro-batches, which must be equal."""
        loss = self.program.step(micro_batches=list(batches)) if len(batches) > 1 else self.program.step(batches[0])
        self.other.zero_grad()
        each = [(self.loss(self.eager(x), y), y.numel()) for x, y in batches]
        expected = sum((value * n for value, n in each), torch.zeros(())) / sum(n for _, n in each)
        expected.backward()
        self.other.step()
        assert torch.allclose(loss, expected, rtol=1e-10)
        for a, b in zip(self.net.parameters(), self.eager.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_captures_are_let_go_of() -> None:
    """With their graphs, guards and sources: the least recently used first."""
    pair = Pair(Unsized(), max_captures=2)
    pair.step(batch(2, 5))
    pair.step(batch(2, 6))
    first, second = pair.program._compiled
    gone = [weakref.ref(x) for x in (second, second.joint.module, second.joint.guards, second.graphs["step"])]
    names = {g.forward.__code__.co_filename for g in second.every_graph}
    assert names <= _sources().keys()
    del second
    pair.step(batch(2, 5))
    pair.step(batch(2, 7))
    assert pair.captures == 2 and first in list(pair.program._compiled)
    gc.collect()
    assert [x() for x in gone] == [None] * 4 and not names & _sources().keys()
    sources = len(_sources())
    pair.step(batch(2, 6))
    assert len(_sources()) == sources
    with pytest.raises(SpecError, match="max_captures"):
        Pair(max_captures=0)


class Unsized(Scorer):
    """Its lengths cannot be symbols: what it computes is chosen by each."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * float(str(len(range(int(ids.shape[1]))))) / float(str(ids.shape[1]))


def test_one_capture_serves_all_lengths() -> None:
    pair = Pair()
    for length in (5, 9, 12, 3, 30, 5, 17, 8):
        pair.step(batch(2, length))
    assert pair.captures == 2
    for samples, length in ((7, 6), (3, 4), (5, 5), (2, 9), (6, 8), (11, 3)):
        pair.step(batch(samples, length))
    assert pair.captures == 3
    pair.step(batch(4, 9), batch(2, 7), batch(3, 5))
    assert pair.captures == 3
    pair.step(batch(1, 5))  # of one, a dimension may be passed over
    pair.step(batch(3, 1))
    assert pair.captures == 5


def test_what_cannot_be_symbols_is_captured_by_itself() -> None:
    pair = Pair(Unsized())
    for length in (5, 9, 7, 9):
        pair.step(batch(2, length))
    assert pair.captures == 3
