"""How gradients lie in memory, where a program rather than autograd puts them into `grad`."""

from __future__ import annotations

import torch


def laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient as autograd would lay it out: as the parameter where that is dense, which fused optimizers rely on,
    and else row by row. Dimensions of one element may lie anyhow."""
    if gradient.layout != torch.strided or _alike(gradient, parameter):
        return gradient
    like = torch.empty_like(parameter, dtype=gradient.dtype)
    return like.copy_(gradient) if _alike(like, parameter) else gradient.contiguous()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in strides)
