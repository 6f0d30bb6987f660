"""The modules that a loss reaches which is no module itself: a lambda around a criterion, a trainer's method."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_MOST = 2_000
"""Objects that are looked at, at most."""
_Named = frozenset[str]


def held_modules(loss_fn: Any) -> list[nn.Module]:
    """The modules, without those within them, that a function's code leads to: in its closure, its defaults, the
    globals that it names, and of objects found there the attributes that it names."""
    waiting: list[tuple[Any, _Named]] = [(loss_fn, frozenset())]
    known: set[tuple[int, _Named]] = set()
    held: list[Any] = []  # so that no other object gets an id that is known
    found: list[nn.Module] = []
    while waiting and len(held) < _MOST:
        value, names = waiting.pop()
        key = id(value), names if hasattr(value, "__dict__") else frozenset()
        if key in known or isinstance(value, (type, ModuleType)):
            continue
        known.add(key)
        held.append(value)
        if isinstance(value, nn.Module):
            found.append(value)
        elif isinstance(value, (FunctionType, MethodType)):
            waiting += _of_code(value)
        elif isinstance(value, partial):
            waiting += [(v, names) for v in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, dict):
            waiting += [(v, names) for v in value.values()]
        elif isinstance(value, (list, tuple, set)):
            waiting += [(v, names) for v in value]
        else:
            waiting += _of_object(value, names)
    return list(dict.fromkeys(found))


def _of_code(called: FunctionType | MethodType) -> Iterable[tuple[Any, _Named]]:
    """What a function or a method finds beside its arguments, with the names that its code uses."""
    function = called.__func__ if isinstance(called, MethodType) else called
    if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] == "torch":
        return []
    names = _names(function.__code__)
    found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found += [function.__globals__[n] for n in names if n in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    if isinstance(called, MethodType):
        found.append(called.__self__)
    return [(value, names) for value in found]


def _of_object(value: Any, names: _Named) -> Iterable[tuple[Any, _Named]]:
    """Of an object's attributes those that are named, and of its class the methods and properties."""
    own = getattr(value, "__dict__", None)
    if type(own) is not dict:
        return []
    functions = [
        getattr(f, "fget", getattr(f, "__func__", f))
        for c in type(value).__mro__
        for n, f in vars(c).items()
        if n in names or n == "__call__"
    ]
    methods = [(MethodType(f, value), names) for f in functions if isinstance(f, FunctionType)]
    return [*((v, names) for n, v in own.items() if n in names), *methods]


def _names(code: CodeType) -> _Named:
    """The globals and attributes that code names, with those that the functions within name."""
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))
