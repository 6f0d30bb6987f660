"""Modules that are replaced, added or left out between steps, with their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import PlanMismatchError


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


@pytest.mark.parametrize("capture", ["auto", "never"])
@pytest.mark.parametrize(
    "change, said",
    [
        (lambda m: setattr(m, "head", nn.Linear(4, 3)), r"'head\.weight' was replaced by another one, with the module"),
        (lambda m: m.body.append(nn.Linear(4, 4)), r"'body\.2\.weight' came later than the plan"),
        (lambda m: setattr(m, "head", nn.Identity()), r"'head\.weight' is gone"),
        (lambda m: m.head.register_parameter("scale", nn.Parameter(torch.ones(3))), r"'head\.scale' came later"),
    ],
)
def test_parameters_that_come_or_go_with_modules_are_refused_by_name(
    capture: Literal["auto", "never"], change: Callable[[nn.Module], object], said: str
) -> None:
    model, batch = _Headed(), (torch.randn(5, 4), torch.randn(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = autopar.optimize(
        model, example_inputs=batch, loss_fn=F.mse_loss, optimizer=optimizer, capture=capture, check="never"
    )
    model.body[1] = nn.ReLU()  # without parameters
    program.step(batch)
    change(model)
    with pytest.raises(PlanMismatchError, match=said):
        program.step(batch)


@pytest.mark.parametrize("capture", ["auto", "never"])
def test_a_layer_that_is_used_in_turns_is_trained_eagerly_and_refused_in_a_graph(
    capture: Literal["auto", "never"],
) -> None:
    model, batch = _Headed(), (torch.randn(5, 4), torch.randn(5, 4))
    model.head = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = autopar.optimize(
        model,
        example_inputs=batch,
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        capture=capture,
        unused_parameters="freeze",
    )
    program.step(batch)
    model.forward = model.body.forward  # type: ignore[method-assign]
    if capture == "never":
        before = model.head.weight.clone()
        program.step(batch)
        assert torch.equal(model.head.weight, before)
    else:
        with pytest.raises(PlanMismatchError, match=r"no gradient of parameter 'head\.weight'.*capture=\"never\""):
            program.step(batch)
