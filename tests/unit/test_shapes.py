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
from autopar.errors import SignatureError, SpecError
from autopar.ir.leftovers import _sources
from autopar.runtime.model.padding import bucket
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
        scores = (h @ h.transpose(1, 2) / self.scale(ids.shape[1])).masked_fill(~mask, -1e9)
        found: torch.Tensor = self.out(self.drop(torch.tanh(self.hidden(scores.softmax(-1) @ h))))
        return found.flatten(0, 1)

    def scale(self, length: int) -> float:
        return length**0.5  # type: ignore[no-any-return]  # a symbol, while it is traced


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
    pair.step(batch(2, 6))  # in the place of the one that was captured to plan, whose joint graph has no source
    sources = len(_sources())
    pair.step(batch(2, 5))
    assert len(_sources()) == sources
    with pytest.raises(SpecError, match="max_captures"):
        Pair(max_captures=0)


class Unsized(Scorer):
    """Its lengths cannot be symbols: what it computes is chosen by each."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (float(str(int(ids.shape[1]))) / float(str(int(ids.shape[1]))))

    def scale(self, length: int) -> float:
        return 3.0


def test_one_capture_serves_all_lengths() -> None:
    pair = Pair()
    for length in (5, 9, 12, 3, 30, 5):
        pair.step(batch(2, length))
    assert pair.captures == 2
    for samples, length in ((7, 6), (3, 4), (5, 5), (11, 3)):
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


def test_dropout_draws_what_eager_training_draws() -> None:
    pair = Pair(Scorer(0.3))
    for seed, length in enumerate((5, 9, 12, 9)):
        state = torch.get_rng_state()
        loss = pair.program.step(batch(2, length))
        torch.set_rng_state(state)
        pair.other.zero_grad()
        expected = pair.loss(pair.eager(batch(2, length)[0]), batch(2, length)[1])
        expected.backward()
        pair.other.step()
        assert torch.allclose(loss, expected, rtol=1e-10), seed
    assert pair.captures == 2


class Pooled(nn.Module):
    """Means over what the batch's sizes decide: the loss's weight follows from them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        out: torch.Tensor = self.last(h[:, 1:] + h.mean(1, keepdim=True)) if x.shape[1] <= 20 else self.last(h[:, 1:])
        return out


def shifted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target[:, 1:])


def _points(samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(samples * 100 + length)
    return tuple(torch.randn(samples, length, k, generator=draw, dtype=torch.float64) for k in (3, 2))  # type: ignore[return-value]


def test_weights_follow_the_sizes_and_branches_on_sizes_have_their_captures() -> None:
    """Of micro-batches, each counts by its elements, of which there is one less in each row than the batch has."""
    pair = Pair(Pooled(), _points(2, 6), shifted)
    pair.step(_points(2, 6))
    pair.step(_points(2, 9))
    (weight,) = [c.weight for c in pair.program._compiled if c.joint.sizes is not None]
    assert float(weight.of(_points(2, 17))) == 2 * 16 * 2
    pair.program.step(micro_batches=[_points(2, 8), _points(2, 5)])
    pair.other.zero_grad()
    both = [F.mse_loss(pair.eager(x), y[:, 1:], reduction="sum") for x, y in (_points(2, 8), _points(2, 5))]
    (sum(both) / (2 * 2 * (7 + 4))).backward()  # type: ignore[union-attr]
    pair.other.step()
    for length in (30, 25, 41, 11):
        pair.step(_points(2, length))
    assert pair.captures == 3, "long ones, short ones, and the first"


def test_a_capture_that_is_disproved_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.ir.served import Sizes

    right = Sizes.of
    monkeypatch.setattr(Sizes, "of", lambda self, shapes: tuple(max(2, n - 1) for n in right(self, shapes)))
    pair = Pair(Pooled(), _points(2, 6), lambda output, target: (output**2).mean() * output.shape[1])
    for length in (6, 9, 7, 9):
        pair.step(_points(2, length))
    assert pair.captures == 3 and pair.program._shapes.reasons


def test_compiled_captures_are_for_one_size() -> None:
    pair = Pair()
    pair.program._shapes.are_symbolic = False  # as with compile=True
    for length in (5, 9, 7):
        pair.step(batch(2, length))
    assert pair.captures == 3


def test_padding_bounds_the_captures_of_a_model_without_symbols() -> None:
    pair = Pair(Unsized(), pad={0: 0, 1: -100})
    for length in (5, 7, 8, 3, 11, 16, 15):
        pair.step(batch(2, length))
    assert pair.captures <= 3
    assert [bucket(n) for n in (1, 8, 9, 33, 64, 65, 100, 1000)] == [8, 8, 16, 40, 64, 80, 112, 1024]


def test_padding_that_changes_the_loss_is_refused() -> None:
    pair = Pair(Pooled(), _points(2, 8), shifted, pad={0: 0, 1: 0})
    pair.step(_points(2, 8))
    with pytest.raises(SignatureError, match="does not train the model as it does itself: the"):
        pair.program.step(_points(2, 7))
    with pytest.raises(SignatureError, match="pad names 'ids'"):
        Pair(pad={"ids": 0})
    with pytest.raises(SpecError, match="expected the name or position"):
        Pair(pad={"ids": "zero"})
    with pytest.raises(SpecError, match="without an optimizer"):
        autopar.optimize(Pooled().double(), example_inputs=_points(2, 8)[0], pad={"x": 0})  # type: ignore[call-overload]


class Progress(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, progress: float) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x)
        return scores.square().mean() * (1 + progress)


def test_a_value_that_is_another_one_in_each_batch_is_not_captured_for_ever() -> None:
    net, eager = Progress(), Progress()
    eager.load_state_dict(net.state_dict())
    x = torch.randn(5, 4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, eager)]
    program = autopar.optimize(net, example_inputs={"x": x, "progress": 0.0}, optimizer=optimizers[0], max_captures=2)
    with pytest.warns(autopar.AutoparWarning, match="last 3 batches held another value beside its tensors"):
        losses = [float(program.step({"x": x, "progress": i / 6})) for i in range(6)]
    assert len(list(program._compiled)) == 2
    for i, found in enumerate(losses):
        optimizers[1].zero_grad()
        loss = eager(x, i / 6)
        loss.backward()
        optimizers[1].step()
        assert found == pytest.approx(float(loss.detach()))
