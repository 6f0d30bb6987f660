"""Copies of a training job's objects: models, optimizers and losses as users write them, none of which is made to be
copied.

`copy.deepcopy` takes functions for constants, although they may know the model: by a variable of the function around
them, a default, a global name, or another function. Such functions are made anew, so that they know the copy.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import SpecError
from autopar.runtime.optimizers.joint_optimizer import JointOptimizer, each_of

_DEEPEST, _MOST = 8, 1_000
"""How far a model is looked for in what functions know, and the longest container that is looked into."""
_LIBRARIES = ("torch", "numpy", "autopar", "builtins", "functools", "collections", "threading")
"""Whose functions and objects know no model of the user's."""
_OF_TORCH = ("_parameters", "_buffers", "_modules")


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
        loss = copy.deepcopy(loss_fn, memo) if isinstance(loss_fn, nn.Module) else loss_fn
        own_scaler = copy.deepcopy(scaler, memo)
    except Exception as e:  # whatever the user's own objects raise
        raise SpecError(
            "a quality budget tries plans on copies of the model, the optimizer and the loss, and one of them cannot "
            f"be copied: copy.deepcopy raises {type(e).__name__}: {e}. Hold what cannot be copied outside of them, or "
            "define __deepcopy__"
        ) from e
    known = _Known(memo)
    for owner in (own, loss):
        for module in owner.modules() if isinstance(owner, nn.Module) else ():
            vars(module).update({n: known.of(v) for n, v in vars(module).items() if n not in _OF_TORCH})
    return own, joint, known.of(loss), own_scaler


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


class _Known:
    """Makes what knows the model anew, so that it knows the copy; what does not know it stays as it is."""

    def __init__(self, copied: Mapping[int, Any]) -> None:
        """`copied`: the copies there are, by the identity of what they are copies of, as `copy.deepcopy` has it."""
        self._copied = copied
        self._made: dict[int, Any] = {}
        self._alive: list[Any] = []
        """What was looked at, so that no other object comes to have its identity."""

    def of(self, value: Any, depth: int = 0) -> Any:
        """The value, or what stands for it where it knows the model."""
        if id(value) in self._copied:
            return self._copied[id(value)]
        if id(value) in self._made:
            return self._made[id(value)]
        if depth > _DEEPEST or isinstance(value, (nn.Module, torch.Tensor, Optimizer, type, types.ModuleType)):
            return value
        self._alive.append(value)
        self._made[id(value)] = value  # where it is found again within itself
        made = self._made[id(value)] = self._anew(value, depth + 1)
        return made

    def _anew(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__, depth)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            found = [self.of(part, depth) for part in parts]
            if _same(parts, found):
                return value
            first = 1 + len(value.args)
            return functools.partial(found[0], *found[1:first], **dict(zip(value.keywords, found[first:], strict=True)))
        if isinstance(value, weakref.ReferenceType):
            target = self.of(value(), depth)
            return value if target is value() else weakref.ref(target)
        if type(value) in (list, tuple, dict, OrderedDict) and len(value) <= _MOST:
            if not isinstance(value, dict):
                found = [self.of(one, depth) for one in value]
                return value if _same(value, found) else type(value)(found)
            found = [self.of(one, depth) for one in value.values()]
            return value if _same(value.values(), found) else type(value)(zip(value, found, strict=True))
        return self._instance(value, depth)

    def _instance(self, value: Any, depth: int) -> Any:
        """An object of a class of the user's own."""
        kind = type(value)
        if kind.__module__.partition(".")[0] in _LIBRARIES or not isinstance(getattr(value, "__dict__", None), dict):
            return value
        found = {name: self.of(one, depth) for name, one in vars(value).items()}
        if _same(vars(value).values(), found.values()):
            return value
        made = object.__new__(kind)
        vars(made).update(found)
        return made

    def _function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES and function.__closure__ is None:
            return function
        cells = function.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        names = [n for n in sorted(_names(function.__code__)) if n in function.__globals__]
        known = [function.__globals__[n] for n in names]
        parts = [function.__defaults__, function.__kwdefaults__, function.__dict__, *contents, *known]
        found = [self.of(part, depth) for part in parts]
        if _same(parts, found):
            return function
        defaults, keywords, attributes, *rest = found
        new_cells = [
            types.CellType(new) if new is not old else cell
            for cell, old, new in zip(cells, contents, rest, strict=False)
        ]
        own = dict(zip(names, rest[len(cells) :], strict=True))
        made = types.FunctionType(
            function.__code__, {**function.__globals__, **own}, function.__name__, defaults, tuple(new_cells)
        )
        made.__kwdefaults__ = keywords
        made.__dict__.update(attributes)
        for name, old in zip(names, known, strict=True):
            if old is function:
                made.__globals__[name] = made
        return made


def _same(before: Any, after: Any) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


def _names(code: types.CodeType) -> set[str]:
    """That a function reads, with those that functions within it read."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *(name for one in inner for name in _names(one))}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not there yet
        return None
