"""Attributes of tensors and classes that TorchDynamo does not trace: such models are captured, and train the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import CaptureError
from tests.tiers import newer

Function = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A linear layer within any function of it and of the batch."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer, x).square().mean()


def _leaf_of_the_batch(layer: nn.Module, x: torch.Tensor) -> Any:
    """As in Hugging Face's speech models."""
    h = x[:, None]
    h.requires_grad = True
    return layer(h)


def _constant(layer: nn.Module, x: torch.Tensor) -> Any:
    """As in PEFT's AdaLoRA."""
    one = torch.eye(4)
    one.requires_grad = False
    return layer(x @ one)


def _leaf_behind_the_layer(layer: nn.Module, x: torch.Tensor) -> Any:
    """What lies before gets its gradient by another way alone."""
    h = layer(x)
    cut = h.detach()
    cut.requires_grad = True
    return h + 2 * cut.sigmoid()


def _asks_for_its_gradient(layer: nn.Module, x: torch.Tensor) -> Any:
    """A gradient penalty: captured or not, it must not be lost."""
    h = x * 1
    h.requires_grad = True
    (slope,) = torch.autograd.grad(layer(h).square().sum(), h, create_graph=True)
    return slope


@lru_cache
def _ramp(size: int) -> torch.Tensor:
    return torch.arange(float(size))


def _keeps_what_is_the_same(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(F.dropout(x, 0.0) * _ramp(x.shape[1]))


def _named(layer: nn.Module, x: torch.Tensor) -> Any:
    """As in PEFT's DoRA."""
    assert isinstance(layer.weight, torch.Tensor)
    kind = type(layer.weight)
    scale = 3 if kind.__module__.startswith("torch.") and kind.__name__.lower() == "parameter" else 1
    return scale * layer(x)


@pytest.mark.parametrize(
    "function",
    [
        _leaf_of_the_batch,
        pytest.param(_constant, marks=newer),
        _leaf_behind_the_layer,
        _named,
        _keeps_what_is_the_same,
    ],
)
def test_it_is_captured_and_trains_the_same(function: Function) -> None:
    model, x = Layer(function), torch.randn(5, 4)
    eager = copy.deepcopy(model)
    alone = torch.optim.SGD(eager.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = autopar.optimize(model, optimizer=optimizer, example_inputs=x, capture="always")
    for _ in range(2):
        program.step(x)
        alone.zero_grad()
        eager(x).backward()
        alone.step()
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def _freezes(layer: nn.Module, x: torch.Tensor) -> Any:
    for p in layer.parameters():
        p.requires_grad = False
    return layer(x)


@lru_cache
def _noise(size: int) -> torch.Tensor:
    return torch.rand(size)


def _draws_once(layer: nn.Module, x: torch.Tensor) -> Any:
    """`functools.lru_cache` gives the same numbers in each step."""
    return layer(x * _noise(x.shape[1]))


@pytest.mark.parametrize("function", [_freezes, _asks_for_its_gradient, _draws_once])
def test_what_counts_is_not_captured(function: Function) -> None:
    model = Layer(function)
    with pytest.raises(CaptureError):
        autopar.optimize(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            example_inputs=torch.randn(5, 4),
            capture="always",
        )
