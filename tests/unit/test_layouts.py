"""Group normalization of memory that lies otherwise than tracing says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tests.unit.as_eager import train


class Attended(nn.Module):
    """Group normalization behind what attention over pixels does to the layout, as in autoencoders of diffusion."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.across, self.norm = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(x)
        mixed = self.across(h.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(h.shape)
        found: torch.Tensor = self.norm(mixed).sin().mean()
        return found


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2, 3, 1), (2, 1)])
def test_group_normalization_of_one_sample(sizes: Sequence[int]) -> None:
    train(Attended(), [torch.randn(n, 3, 4, 4) for n in sizes], capture="always")
