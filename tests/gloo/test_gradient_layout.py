"""Gradients of a drop-in module lie in memory as autograd lays them out: fused optimizers read them so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gloo.ranks import run_ranks


class Lit(nn.Module):
    """Its gradient comes row by row, and is laid out anew."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(0))
        self.image = nn.Parameter(drawn.contiguous(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > self.image, x, self.image).square().mean()


def of_ranks(rank: int, world_size: int) -> list[tuple[list[int], float]]:
    import autopar

    batches = [torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    plain = Lit()
    plain(torch.cat(batches)).backward()
    found = []
    for capture in ("auto", "never"):
        made: Any = autopar.optimize(Lit(), example_inputs=batches[rank], capture=capture)
        made(batches[rank]).backward()
        grad = made.module.image.grad
        assert plain.image.grad is not None
        found.append((list(grad.stride()), float((grad - plain.image.grad).abs().max())))
    return found


def test_gradients_lie_as_parameters_do() -> None:
    for found in run_ranks(2, of_ranks):
        assert [stride for stride, _ in found] == [[24, 1, 6, 2]] * 2
        assert max(off for _, off in found) < 1e-6
