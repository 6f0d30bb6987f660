"""Buffers that the forward pass assigns: each model trains as in eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
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
