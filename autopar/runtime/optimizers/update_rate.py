"""How fast an optimizer updates parameters on the device at hand."""

from __future__ import annotations

from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from autopar.ir.weightless import lacks_values
from autopar.runtime.clock import Clock
from autopar.runtime.optimizers.optimizer import may_fuse, optimizer_scope, without_wrong_kernels
from autopar.runtime.optimizers.own_settings import bare_copy

MOST_ELEMENTS = 1 << 22
"""The most elements that are updated; those of a larger model are taken to be updated at the same rate."""
REPEATS = 3
"""Updates that are timed, behind one that warms up."""


def update_s_per_byte(optimizer: Optimizer) -> float | None:
    """Seconds that an update takes for each byte of parameters, the median over a few, on a tensor that stands for
    them: neither they nor the optimizer are changed. `None` where an update may do more than change each element, as
    that of an optimizer which is not PyTorch's own, or with hooks for all optimizers; and where parameters have no
    values.
    """
    hooked = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    known = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
    group = max(optimizer.param_groups, key=lambda g: sum(p.numel() for p in g["params"]))
    elements = min(MOST_ELEMENTS, sum(p.numel() for p in group["params"]))
    if hooked or not known or optimizer_scope(optimizer) != "element" or not elements or group.get("differentiable"):
        return None
    like: torch.Tensor = group["params"][0]
    if any(map(lacks_values, group["params"])):
        return None
    values = nn.Parameter(torch.ones(elements, dtype=like.dtype, device=like.device))
    part = bare_copy(optimizer)
    part.param_groups = [{**group, "params": [values]}]
    if may_fuse(part, part.param_groups[0]):
        part.param_groups[0]["fused"] = True
    without_wrong_kernels(part)
    values.grad = torch.full_like(values, 1e-3)
    clock = Clock(like.device)
    took_s = median([clock.of(part.step) for _ in range(1 + REPEATS)][1:])
    return took_s / float(elements * like.element_size())
