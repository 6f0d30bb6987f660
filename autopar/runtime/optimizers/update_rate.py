"""How fast an optimizer updates parameters on the device at hand."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from autopar.ir.weightless import lacks_values
from autopar.runtime.optimizers.optimizer import may_fuse, optimizer_scope, without_wrong_kernels
from autopar.runtime.optimizers.own_settings import bare_copy

MOST_ELEMENTS = 1 << 22
"""That are updated; the rest of a larger model is taken to go as fast."""
REPEATS = 3
"""Behind one that warms up."""


def update_s_per_byte(optimizer: Optimizer) -> float | None:
    """Seconds that an update takes for each byte of parameters, the median over a few, on a tensor that stands for
    them: neither they nor the optimizer are changed. `None` where an update may do more than that, as of an optimizer
    that is not PyTorch's own, or with hooks of the user's; and where parameters have no values.
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
    seconds = []
    for _ in range(1 + REPEATS):
        start = _now(like.device)
        part.step()
        seconds.append(_now(like.device) - start)
    took_s = float(median(seconds[1:]))
    return took_s / float(elements * like.element_size())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
