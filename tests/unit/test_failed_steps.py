"""A step that has raised leaves nothing to the next one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar


class Fails(nn.Module):
    """Runs eagerly, and may fail in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(4, 2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        if self.fails:
            found.register_hook(_fail)
        return found


def _fail(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("a backward pass fails")


def test_outputs_of_an_eager_step_that_has_failed_are_dropped() -> None:
    net, y = Fails(), torch.zeros(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    program: Any = autopar.optimize(
        net, example_inputs=(torch.ones(3, 4), y), loss_fn=F.mse_loss, optimizer=optimizer, capture="never"
    )
    net.fails = True
    with pytest.raises(ValueError, match="fails"):
        program.step((torch.ones(3, 4), y), outputs=True)
    net.fails = False
    x = torch.full((3, 4), 2.0)
    expected = net(x).detach()
    assert torch.equal(program.step((x, y), outputs=True).output, expected)
