"""Parameters with a little noise: zeros, as LoRA's B begins with, hide errors in what they are multiplied by."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

PERTURBATION = 1e-2
"""Of the trial's parameters, relative to the root of their mean square."""
_DRAWN = 8_209
"""Random numbers for one parameter at most, which then repeat; a prime, so that rows next to each other differ."""


def perturb(parameters: Mapping[str, nn.Parameter], relative: float) -> None:
    """Adds noise to whole parameters, the same on all ranks: `relative` to their root mean square."""
    with torch.no_grad():
        for seed, (_, p) in enumerate(sorted(parameters.items())):
            if p.numel():
                norm = torch.linalg.vector_norm(torch.view_as_real(p) if p.is_complex() else p, dtype=torch.float64)
                p.add_(_noise(p, seed), alpha=relative * max(float(norm) / math.sqrt(p.numel()), PERTURBATION))


def round_otherwise(parameters: Mapping[str, nn.Parameter], to: torch.dtype | None = None, draw: int = 0) -> None:
    """Moves each element of parameters up or down, the same way on all ranks: by four roundings to its own dtype, or by
    one rounding to the narrower dtype `to`. Another `draw` takes other directions."""
    with torch.no_grad():
        for seed, (_, p) in enumerate(sorted(parameters.items())):
            by = 2 * torch.finfo(p.dtype).eps if to is None else torch.finfo(to).eps / 2
            p.mul_(1 + by * torch.sgn(_noise(p, seed + draw * len(parameters))))


def _noise(p: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal, of a parameter's shape. Of a large one the numbers repeat: an addition takes a tenth of what drawing one
    does."""
    draw = torch.Generator(p.device).manual_seed(seed)
    drawn = torch.randn(min(p.numel(), _DRAWN), generator=draw, dtype=torch.float32, device=p.device).to(p.dtype)
    return drawn.repeat(max(1, -(-p.numel() // _DRAWN)))[: p.numel()].view(p.shape)
