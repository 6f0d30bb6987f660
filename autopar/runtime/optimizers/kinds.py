"""What kind of optimizer one is, as far as strategies ask."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from autopar.runtime.optimizers.joint_optimizer import each_of

_WITH_MOMENTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
"""Optimizers that keep a first and a second moment, `exp_avg` and `exp_avg_sq`."""


def kind_of(optimizer: Optimizer) -> str:
    """The names of its classes."""
    return " and ".join(dict.fromkeys(type(o).__name__ for o in each_of(optimizer)))


def leaves_zeros_alone(optimizer: Optimizer | None) -> bool:
    """Whether the optimizer does nothing to an element whose gradient is zero, and takes sparse gradients: then rows
    that no rank has looked up need not be touched."""
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adagrad):
        return False
    assert optimizer is not None
    kept = ("momentum", "weight_decay", "maximize", "fused")  # fused kernels take no sparse gradients
    return not any(group.get(k) for group in optimizer.param_groups for k in kept)


def keeps_moments(optimizer: Optimizer | None) -> bool | None:
    """Whether the optimizer keeps a first and a second moment; `None` where there is none yet."""
    return None if optimizer is None else all(type(o) in _WITH_MOMENTS for o in each_of(optimizer))


def is_plain_sgd(optimizer: Optimizer | None) -> bool | None:
    """Whether the optimizer is SGD without momentum, by its settings now; `None` where there is none yet."""
    each = () if optimizer is None else each_of(optimizer)
    return (
        all(type(o) is torch.optim.SGD and not any(g["momentum"] for g in o.param_groups) for o in each)
        if each
        else None
    )


def is_plain_adam(optimizer: Optimizer | None) -> bool | None:
    """Whether the optimizer is Adam or AdamW, which divides by the newest variance, by its settings now; `None` where
    there is none yet."""
    if optimizer is None:
        return None
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    others = ("amsgrad", "differentiable")
    return all(
        type(o) in kinds and not any(g.get(k) for g in o.param_groups for k in others) for o in each_of(optimizer)
    )


def variance_steps(optimizer: Optimizer | None) -> int:
    """Steps that Adam's variance is an average over, the most of all its groups; 0 for other optimizers."""
    if optimizer is None or not is_plain_adam(optimizer):
        return 0
    betas = [float(g["betas"][1]) for o in each_of(optimizer) for g in o.param_groups]
    return max((round(1 / (1 - beta)) for beta in betas if beta < 1), default=0)
