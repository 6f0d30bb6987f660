"""Adam's update with a momentum that was received, and a variance that stays as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def step_frozen(
    parameters: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    momenta: Sequence[torch.Tensor],
) -> None:
    """Updates parameters in place, as `torch.optim.Adam` and `AdamW` do it, from momenta that replace their own.

    The variance is frozen as Adam divides by it, corrected for the zeros that it began with: the estimate that is kept
    grows as that correction fades, as if each gradient's square were the estimate before. So its state is what Adam
    would have, with which any other plan goes on.
    """
    torch._foreach_add_([s["step"] for s in states], 1)
    steps = _numbers([s["step"] for s in states])
    beta1 = [float(s["betas"][0]) for s in settings]
    beta2 = [float(s["betas"][1]) for s in settings]
    rates = [float(s["lr"]) for s in settings]
    means, variances = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    torch._foreach_copy_(means, list(momenta))
    corrections = [1 - b**t for b, t in zip(beta2, steps, strict=True)]
    grown = [c / (1 - b ** (t - 1)) if t > 1 else 1.0 for c, b, t in zip(corrections, beta2, steps, strict=True)]
    torch._foreach_mul_(variances, grown)
    decays = [
        1 - r * s["weight_decay"] if s["decoupled_weight_decay"] else 1.0 for r, s in zip(rates, settings, strict=True)
    ]
    if any(d != 1 for d in decays):
        torch._foreach_mul_(list(parameters), decays)
    roots = torch._foreach_sqrt(variances)
    torch._foreach_div_(roots, [math.sqrt(c) for c in corrections])
    torch._foreach_add_(roots, [float(s["eps"]) for s in settings])
    sizes = [-r / (1 - b**t) for r, b, t in zip(rates, beta1, steps, strict=True)]
    torch._foreach_addcdiv_(list(parameters), means, roots, sizes)


def _numbers(steps: Sequence[torch.Tensor]) -> list[float]:
    """How many steps each parameter has made. On the host already, unless the optimizer is fused or capturable on a
    device, for which the host waits once."""
    if all(s.device.type == "cpu" for s in steps):
        return [float(s) for s in steps]
    return [float(s) for s in torch.stack(list(steps)).tolist()]
