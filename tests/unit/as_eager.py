"""Trains a model with autopar and eagerly, and compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.batch import call_model


def train(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: Any = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    **settings: Any,
) -> None:
    """Some steps, in the model's own dtype; asserts that eager PyTorch comes to the same."""
    eager = copy.deepcopy(model)
    program = autopar.optimize(
        model, optimizer=optimizer(model.parameters()), example_inputs=batches[0], loss_fn=loss_fn, **settings
    )
    losses = [float(program.step(b)) for b in batches]
    alone = optimizer(eager.parameters())
    for batch, loss in zip(batches, losses, strict=True):
        alone.zero_grad()
        output, target = call_model(eager, batch, loss_fn is not None)
        expected = output if loss_fn is None else loss_fn(output, target)
        expected.backward()
        alone.step()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name
    for (name, c), d in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.allclose(c, d, rtol=1e-4, atol=1e-6), name
