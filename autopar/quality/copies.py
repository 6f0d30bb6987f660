"""Copies of a training job's objects: models, optimizers and losses as users write them, none of which is made to be
copied."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import SpecError
from autopar.runtime.optimizers.joint_optimizer import JointOptimizer, each_of


def copies_of(model: nn.Module, optimizer: Optimizer, loss_fn: Any, scaler: Any) -> tuple[Any, ...]:
    """Copies of the four that belong together as they do, and share nothing with them. Raises `SpecError` where one of
    them cannot be copied."""
    memo: dict[int, Any] = {}
    for owner in (model, loss_fn):
        if isinstance(owner, nn.Module):
            memo |= {id(t): t.detach().clone() for t in _made_by_forward(owner)}
    try:
        own = copy.deepcopy(model, memo)
        each = [_optimizer(one, memo) for one in each_of(optimizer)]
        joint = JointOptimizer(each) if isinstance(optimizer, JointOptimizer) else each[0]
        return own, joint, _loss(loss_fn, memo), copy.deepcopy(scaler, memo)
    except SpecError:
        raise
    except Exception as e:  # whatever the user's own objects raise
        raise SpecError(
            "a quality budget tries plans on copies of the model, the optimizer and the loss, and one of them cannot "
            f"be copied: copy.deepcopy raises {type(e).__name__}: {e}. Hold what cannot be copied outside of them, or "
            "define __deepcopy__"
        ) from e


def _made_by_forward(module: nn.Module) -> list[torch.Tensor]:
    """What a forward pass has left behind and will make again, as the weight under `torch.nn.utils.weight_norm`."""
    values = (value for one in module.modules() for value in vars(one).values())
    return [v for v in values if isinstance(v, torch.Tensor) and not v.is_leaf]


def _optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """With attributes that a class of the user's own has given it, which `Optimizer.__getstate__` leaves out."""
    made = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        # Methods that schedulers put in place of the class's own are theirs, and hold the optimizer itself.
        if name not in vars(made) and not hasattr(type(optimizer), name):
            setattr(made, name, copy.deepcopy(value, memo))
    return made


def _loss(loss_fn: Any, memo: dict[int, Any]) -> Any:
    """The loss, which reads the copied model where it reads the model: as its method, or as a name that it knows."""
    if isinstance(loss_fn, (nn.Module, types.MethodType, functools.partial)):
        return copy.deepcopy(loss_fn, memo)
    if not isinstance(loss_fn, types.FunctionType):
        return loss_fn
    known = {n: v for n in _names(loss_fn.__code__) if _is_copied(v := loss_fn.__globals__.get(n), memo)}
    cells = loss_fn.__closure__ or ()
    if not known and not any(_is_copied(_content(cell), memo) for cell in cells):
        return loss_fn
    made = types.FunctionType(
        loss_fn.__code__,
        {**loss_fn.__globals__, **{n: copy.deepcopy(v, memo) for n, v in known.items()}},
        loss_fn.__name__,
        loss_fn.__defaults__,
        tuple(
            types.CellType(copy.deepcopy(held, memo)) if _is_copied(held := _content(cell), memo) else cell
            for cell in cells
        ),
    )
    made.__kwdefaults__ = loss_fn.__kwdefaults__
    return made


def _names(code: types.CodeType) -> set[str]:
    """That a function reads, with those that functions within it read."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *(name for one in inner for name in _names(one))}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not there yet
        return None


def _is_copied(value: Any, memo: dict[int, Any]) -> bool:
    """Whether a value is part of what was copied."""
    owner = value.__self__ if isinstance(value, types.MethodType) else value
    return isinstance(owner, (nn.Module, nn.Parameter)) and id(owner) in memo
