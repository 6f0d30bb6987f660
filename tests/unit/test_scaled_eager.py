"""The scale of the loss, in models that run eagerly."""

from __future__ import annotations

import torch
from torch import nn

import autopar

X, Y = torch.randn(5, 4), torch.randn(5, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x))
        return found


def test_the_scale_of_the_loss_reaches_hooks_and_gradients_in_few_bits() -> None:
    """Gradients that are zero in 16 bits without it."""
    moved = []
    for hooked in (False, True):
        net = Net()
        before = net.first.weight.detach().clone()
        if hooked:
            net.first.weight.register_hook(lambda g: g)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        with torch.autocast("cpu", torch.float16):
            step = autopar.optimize(
                net,
                example_inputs=(X, Y),
                loss_fn=lambda out, y: (out.float() * y).mean() * 1e-7,
                optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
                capture="never",
                loss_scale=scaler,
            )
            step.step((X, Y))
        moved.append(net.first.weight.detach() - before)
    assert moved[0].any() and torch.equal(*moved)
