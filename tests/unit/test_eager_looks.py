"""What is seen of models whose loss or hooks go through autograd themselves, and how they train."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar


class Penalized(nn.Module):
    """A critic whose loss holds the norm of its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        score = self.body(x).mean()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        found: torch.Tensor = score + (slope.norm() - 1).square()
        return found


class Hooked(nn.Module):
    """Trains a part of itself from a hook on a tensor: no graph of the loss shows that part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.seldom = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)

        def trained(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                self.hidden(gradient.detach()).sum().backward()

        h.register_hook(trained)
        found: torch.Tensor = self.last(self.seldom(h) if x.sum().item() > 1e6 else h).mean()
        return found


class Again(nn.Module):
    """Computes a layer again in its backward pass, from where no graph shows its parameters; another, seldom."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = self.seldom(h) if x.sum().item() > 1e6 else h
        found: torch.Tensor = self.last(checkpoint(self.hidden, h, use_reentrant=True)).mean()
        return found


@pytest.mark.parametrize("make", [Penalized, Hooked, Again])
def test_trains_as_in_eager_pytorch(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = autopar.optimize(
            model,
            autopar.ClusterSpec.local(1),
            example_inputs=torch.randn(3, 4),
            optimizer=optimizer,
            capture="never",
            strategy="PS",
        )
        for _ in range(3):
            x = torch.randn(3, 4)
            program.step(x.clone())
            theirs.zero_grad()
            alone(x.clone()).backward()
            theirs.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
