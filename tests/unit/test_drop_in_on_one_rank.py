"""The drop-in module on one rank: gradients are PyTorch's own, and clipped together with those that were kept back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparWarning

ODD = 3
"""Samples of a batch that cannot be captured."""


class Boxes(nn.Module):
    """Takes first what a batch may have none of, by which batches are counted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, boxes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + boxes.sum()
        if len(x) == ODD:
            found = found * 2 if x.sum().item() > 0 else found * 3
        return found


NONE = torch.zeros(0, 4)
HOW = pytest.mark.parametrize(
    ("capture", "size"), [("auto", 4), ("never", 4), ("auto", ODD)], ids=["captured", "eager", "stand-in"]
)


def _module(net: Boxes, capture: Any, **settings: Any) -> Any:
    return autopar.optimize(net, example_inputs=(NONE, torch.ones(4, 4)), capture=capture, **settings)


@HOW
def test_a_batch_that_counts_as_nothing_is_trained_on(capture: Any, size: int) -> None:
    net, other, x = Boxes(), Boxes(), torch.ones(size, 4)
    module = _module(net, capture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)
        module(NONE, x).sum().backward()
    other(NONE, x).sum().backward()
    assert net.layer.weight.grad is not None and torch.equal(net.layer.weight.grad, other.layer.weight.grad)  # type: ignore[arg-type]


@HOW
def test_gradients_that_accumulate_are_clipped_as_one(capture: Any, size: int) -> None:
    net, other = Boxes(), Boxes()
    module = _module(net, capture, clip_grad_norm=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)
        for step in range(2):
            net.zero_grad()
            other.zero_grad()
            xs = [torch.randn(size, 4).abs() for _ in range(3)]
            with module.no_sync():
                for x in xs[:2]:
                    module(NONE, x).square().sum().backward()
            module(NONE, xs[2]).square().sum().backward()
            for x in xs:
                other(NONE, x).square().sum().backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            for p, q in zip(net.parameters(), other.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=1e-5), step  # type: ignore[arg-type]
        module(NONE, xs[0]).square().sum().backward()  # which is clipped alone, and added
        norm = float(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm())
        assert 0.1 + 1e-6 < norm <= 0.2 + 1e-6
