"""How parameters and their optimizer state lie in memory: fused kernels take it for granted that all lie alike."""

from __future__ import annotations

from typing import Any

import torch


def is_dense(p: torch.Tensor) -> bool:
    """Whether elements lie side by side in memory, in whatever order of dimensions."""
    if p.is_contiguous():  # asked for every parameter in each step
        return True
    order = sorted(range(p.dim()), key=lambda d: (p.stride(d), p.shape[d]), reverse=True)
    return p.permute(order).is_contiguous()


def lay_as(leaf: torch.Tensor, state: dict[str, Any]) -> None:
    """Has the moments of a parameter lie as its first step would make them: those that were made, or saved, while it
    had another layout do not."""
    for key, value in state.items():
        if type(value) is torch.Tensor and value.shape == leaf.shape and value.stride() != leaf.stride():
            like = torch.empty_like(leaf, dtype=value.dtype, device=value.device)
            state[key] = value if value.stride() == like.stride() else like.copy_(value)
