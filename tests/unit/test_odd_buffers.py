"""Buffers that the forward pass assigns: each model trains as in eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.batch import flatten
from autopar.ir.buffers import read_and_written
from autopar.ir.build import training_graph
from tests.unit.as_eager import train


class AssignsOne(nn.Module):
    """Assigns to one buffer, and multiplies by another that it leaves as it is; a third lies in expanded memory."""

    calls: torch.Tensor
    scale: torch.Tensor
    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("positions", torch.arange(3).expand(2, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores: torch.Tensor = self.layer(x) * self.scale + self.positions[0]
        return scores.square().mean()


def test_buffers_beside_one_that_is_assigned_are_left_alone() -> None:
    train(AssignsOne(), [torch.randn(5, 4) for _ in range(2)])


class FillsItsCache(nn.Module):
    """Makes a table at its first run, as models with relative positions do."""

    cache: torch.Tensor | None

    def __init__(self, empty: torch.Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("cache", empty)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None or self.cache.shape != (5, 3) or self.cache.dtype != x.dtype:
            self.cache = torch.arange(15, dtype=x.dtype).view(5, 3)
        scores: torch.Tensor = self.layer(x) * self.cache
        return scores.square().mean()


@pytest.mark.parametrize("empty", [None, torch.zeros(1, 1), torch.zeros(5, 3, dtype=torch.float64)])
def test_a_cache_that_the_first_run_fills_is_named_and_captured_once_it_is_full(empty: torch.Tensor | None) -> None:
    model, batches = FillsItsCache(empty), [torch.randn(5, 4) for _ in range(2)]
    with pytest.warns(autopar.AutoparWarning, match=r"another tensor of its buffer 'cache'.*runs eagerly"):
        train(model, batches)
    train(model, batches, capture="always")


class Grows(nn.Linear):
    """Counts in a buffer, once it has one."""

    late: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if "late" in self._buffers:
            self.late.add_(1)
            found = found * self.late
        return found.square().mean()


def test_a_buffer_that_is_registered_later_is_read_and_written() -> None:
    torch.manual_seed(0)
    model, x = Grows(4, 3), torch.randn(5, 4)
    eager = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    program = autopar.optimize(model, example_inputs=(x,), optimizer=optimizer)
    for step in range(4):
        if step == 2:
            for one in (model, eager):
                one.register_buffer("late", torch.ones(()))
        program.step((x,))
        other.zero_grad()
        eager(x).backward()
        other.step()
    assert torch.allclose(model.weight, eager.weight, rtol=1e-6) and float(model.late) == float(eager.late) == 3


class Swaps(nn.Module):
    """Its buffers take each other's places, in one of three ways."""

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 3), how
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x) + self.a - 2 * self.b
        if self.how == "swap":
            self.a, self.b = self.b, self.a
        elif self.how == "history":
            self.b = self.a
            self.a = scores.detach().mean(0)
        else:
            self.b = self.a.detach() + 0
            self.a = self.b[[2, 0, 1]]
        return scores.square().mean()


@pytest.mark.parametrize("how", ["swap", "history", "turn"])
@pytest.mark.parametrize("settings", [{}, {"capture": "never"}], ids=str)
def test_buffers_may_take_each_others_places(how: str, settings: dict[str, Any]) -> None:
    train(Swaps(how), [torch.randn(5, 4) for _ in range(4)], **settings)


class WritesToItsInput(nn.Module):
    """To the batch itself, where dropout leaves it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        x += 1
        return self.layer(x)  # type: ignore[no-any-return]


def test_what_a_trace_does_not_show_of_writes_to_the_batch_is_said() -> None:
    model, optimizer = WritesToItsInput(), torch.optim.SGD
    copied = copy.deepcopy(model)
    batches = [(torch.randn(5, 4), torch.randn(5, 4)) for _ in range(3)]
    with pytest.warns(autopar.AutoparWarning, match="changes tensor 0 of the batch"):
        program = autopar.optimize(
            model,
            example_inputs=batches[0],
            loss_fn=nn.functional.mse_loss,
            optimizer=optimizer(model.parameters(), lr=0.1),
        )
        losses = [float(program.step((x.clone(), y))) for x, y in batches]
    assert losses == pytest.approx(trained_eagerly(copied, [(x.clone(), y) for x, y in batches]))


def test_a_batch_whose_tensors_are_in_one_memory_changes_as_it_does_in_eager_training() -> None:
    """An autoencoder that centers its input in place: its target changes with it."""
    model = WritesToItsInput()
    model.drop = nn.Identity()  # type: ignore[assignment]
    eager = copy.deepcopy(model)
    batches = [torch.randn(5, 4) for _ in range(3)]
    with pytest.warns(autopar.AutoparWarning, match=r"whose memory tensor 1 of the batch is in.*runs eagerly"):
        program = autopar.optimize(
            model,
            example_inputs=(batches[0], batches[0]),
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )
    mine = [x.clone() for x in batches]
    losses = [float(program.step((x, x))) for x in mine]
    theirs = [x.clone() for x in batches]
    assert losses == pytest.approx(trained_eagerly(eager, [(x, x) for x in theirs]))


def test_only_later_batches_in_one_memory_run_eagerly() -> None:
    model = WritesToItsInput()
    model.drop = nn.Identity()  # type: ignore[assignment]
    eager = copy.deepcopy(model)
    x = [torch.randn(5, 4) for _ in range(4)]
    with pytest.warns(autopar.AutoparWarning, match="sets or changes 'tensor 0 of the batch'"):
        program = autopar.optimize(
            model,
            example_inputs=(x[0].clone(), x[0].clone()),
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )

    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        both = x[1].clone()
        return [(x[0].clone(), x[0].clone()), (both, both), (x[2].clone(), x[3].clone())]

    with pytest.warns(autopar.AutoparWarning, match="whose memory tensor 1 of the batch is in"):
        losses = [float(program.step(b)) for b in batches()]
    assert losses == pytest.approx(trained_eagerly(eager, batches()))


def trained_eagerly(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_buffers_that_shared_ones_are_made_of_are_shared_too() -> None:
    """An average of a code book's sizes, which decides the codes of the next step."""

    class Codes(nn.Module):
        codes: torch.Tensor
        sizes: torch.Tensor
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            for name in ("codes", "sizes", "seen"):
                self.register_buffer(name, torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.layer(x) - self.codes
            with torch.no_grad():
                self.seen += 1
                self.sizes.mul_(0.9).add_(scores.mean(0))
                self.codes.copy_(self.sizes / 2)
            return scores.square().mean()

    joint = training_graph(Codes(), flatten(torch.randn(5, 4))).joint
    assert joint is not None
    assert read_and_written(joint) == ("codes", "sizes")
