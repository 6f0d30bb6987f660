"""Inputs of models, drawn one by one from a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

STEPS = 1000
"""Steps of a diffusion's noise schedule."""

Draw = Callable[[torch.Generator, int], Any]
"""An input of a model: of a generator and a number of samples."""


def normal(*shape: int) -> Draw:
    return lambda g, n: torch.randn(n, *shape, generator=g)


def steps(g: torch.Generator, n: int) -> torch.Tensor:
    return torch.randint(STEPS, (n,), generator=g)


def times(g: torch.Generator, n: int) -> torch.Tensor:
    """Where noise is mixed in continuously: in 0..1."""
    return torch.rand(n, generator=g)


def timed(g: torch.Generator, n: int) -> torch.Tensor:
    """Steps of the noise schedule, for models that take them as fractions."""
    return steps(g, n).float()


def classes(g: torch.Generator, n: int) -> torch.Tensor:
    return torch.randint(STEPS, (n,), generator=g)


def same(make: Callable[[], Any]) -> Draw:
    """What all samples share, and a batch has once."""
    return lambda g, n: make()


def each(*values: float) -> Draw:
    """The same numbers for each sample."""
    return lambda g, n: torch.tensor([values]).expand(n, -1).clone()


def ones(*shape: int, dtype: torch.dtype = torch.long) -> Draw:
    """A mask that hides nothing."""
    return lambda g, n: torch.ones(n, *shape, dtype=dtype)


def whole(length: int) -> Draw:
    """Lengths of samples that are not padded."""
    return lambda g, n: torch.full((n,), length)
