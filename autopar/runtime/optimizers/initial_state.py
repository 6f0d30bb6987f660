"""The state that an optimizer begins with, of one parameter, without a step and without a change of the optimizer.

A checkpoint is checked against it. It also fills the checkpoint of a program that has made no step, so that
`torch.distributed.checkpoint.load`, which loads into what is there and nothing else, has something to load into.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.runtime.optimizers.own_settings import bare_copy


def initial_state(
    optimizer: Optimizer, settings: dict[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """PyTorch's optimizers' state of `parameter` before its first step, under a group's settings. Its values are
    those that a missing state stands for, but for SGD with dampening, whose first step has none.

    None for other optimizers, and for those of PyTorch's that do not tell.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return None
    stand_in = nn.Parameter(_one_element_as(parameter), requires_grad=True)
    if kind is torch.optim.SGD:
        return {"momentum_buffer": torch.zeros_like(stand_in).detach()} if settings.get("momentum") else {}
    if not hasattr(kind, "_init_group"):
        return None
    stand_in.grad = _one_element_as(parameter)
    # copy.copy would read each state, which may lie elsewhere (Adagrad's __setstate__)
    blank: Any = bare_copy(optimizer)
    blank.state = defaultdict(dict)
    group = {**settings, "params": [stand_in]}
    if kind is torch.optim.Adagrad:  # whose constructor makes the state
        start = float(group.get("initial_accumulator_value", 0))
        full = complex(start, start) if stand_in.is_complex() else start
        blank.state[stand_in] = {"step": torch.tensor(0.0), "sum": torch.full_like(stand_in, full).detach()}
    lists: list[list[Any]] = [[] for _ in inspect.signature(blank._init_group).parameters][1:]
    try:
        with torch.no_grad():
            blank._init_group(group, *lists)
    except (KeyError, RuntimeError, TypeError, ValueError):  # settings that are none of this optimizer's
        return None
    found = dict(blank.state[stand_in])
    return found if all(isinstance(v, torch.Tensor) for v in found.values()) else None


def placeholder(optimizer: Optimizer, settings: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What stands in a checkpoint for a state that is not there yet: it loads as no state does. Empty where that is
    not known to be so."""
    if settings.get("dampening"):
        return {}
    return initial_state(optimizer, settings, parameter) or {}


def _one_element_as(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of the parameter's shape, without its memory."""
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return one.expand(parameter.shape) if parameter.numel() > 1 else torch.zeros_like(parameter).detach()
