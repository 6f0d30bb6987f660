"""Memory is written over only where nobody reads what was there, the same operator's other operands included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.runtime.proofs.one_pass import step_by_graph

Function = Callable[[torch.Tensor], torch.Tensor]

OVERLAPPING: dict[str, Function] = {
    "h - h[:, :1]": lambda h: h - h[:, :1],
    "h - h[0]": lambda h: h - h[0],
    "h + h.select(1, 2)": lambda h: h + h.select(1, 2),
    "h - h.diagonal()": lambda h: h - h.diagonal(),
    "add(h, h[:, 1:2], alpha=2)": lambda h: torch.add(h, h[:, 1:2], alpha=2),
    "h - h.T": lambda h: h - h.T,
    "h * h.flip": lambda h: h * h.flip(0),
    "h.T * h": lambda h: h.T * h,
    "h / h[1:2]": lambda h: h / (2 + h[1:2]),
    "chunks": lambda h: h.chunk(2, 1)[0] - h.chunk(2, 1)[1],
    "h.view - h[..., :1]": lambda h: h.view(2, 8) - h.view(2, 8)[:, :1],
    "expand": lambda h: h[:, :1].expand(4, 4) * h,
    "unfold": lambda h: h + h.reshape(-1).unfold(0, 4, 4),
    "h + h": lambda h: h + h,
}


class _Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x)).square().mean()


@pytest.mark.parametrize("name", OVERLAPPING)
def test_operands_in_one_memory(name: str) -> None:
    net, x = _Net(OVERLAPPING[name]).double(), torch.randn(4, 4, dtype=torch.float64)
    joint = training_graph(net, flatten(x)).joint
    assert joint is not None
    found = step_by_graph(joint, [*net.parameters(), x, torch.ones((), dtype=torch.float64)])
    expected = net(x)
    expected.backward()
    assert torch.allclose(found.outputs["the loss"], expected, rtol=1e-12)  # type: ignore[arg-type]
    for name, p in net.named_parameters():
        gradient = found.gradients[f"the gradient of '{name}'"]
        assert p.grad is not None and gradient is not None and torch.allclose(gradient, p.grad, rtol=1e-10, atol=1e-12)
