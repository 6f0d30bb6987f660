"""The state of Python objects that a module holds: kept before the module runs, and put back after."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.runtime.model.iterators import is_iterator, rewound


class KeptByProgram:
    """Of autopar's own objects that a hook on a model leads to: not the model's state, but its program's, which running
    or tracing the model may change."""


MOST = 20_000
"""Objects that are looked at, at most: a module may hold on to a data set."""

_CONTAINERS = (OrderedDict, dict, list, deque, set)
"""With their subclasses, as `Counter`; the first that one is an instance of reads and fills it, as what a subclass
overrides may do anything: `ACT2FN[name]` of Transformers makes a new module of what is held there."""
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, KeptByProgram)
_WRAPPERS = ("autopar.", "torch.nn.parallel.", "torch.distributed.")
"""Where modules come from that synchronize another one: what they count themselves goes on."""
_OF_THREADS = {"asyncio", "concurrent", "logging", "multiprocessing", "queue", "socket", "subprocess", "threading"}
"""Modules of Python whose objects, with those of their subclasses, other threads and processes change meanwhile: to put
these back would take away what has come into a queue."""
_Back = Callable[[], None]


def held_within(
    values: Iterable[Any], kept: Collection[nn.Module] | None = None
) -> tuple[list[torch.Tensor], list[_Back]]:
    """The tensors that values hold, in containers and in attributes of objects; and what puts back, of each container,
    object and generator of random numbers, what it holds now. What programs keep is passed over, and so are modules and
    what threads share: queues, loggers, locks.

    `kept`: modules that are kept otherwise. Where it is given, others are not passed over: their buffers are among the
    tensors, and the gradients of their parameters are put back.
    """
    waiting = list(values)
    known = set(map(id, kept or ()))
    tensors: list[torch.Tensor] = []
    back: list[_Back] = []
    held: list[Any] = []  # so that no other object gets an id that is known
    while waiting and len(known) < MOST:
        value = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in known or (kept is None and isinstance(value, nn.Module)):
            continue
        known.add(id(value))
        held.append(value)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, nn.Module) and type(value).__module__.startswith(_WRAPPERS):
            waiting.append(getattr(value, "module", None))
        elif isinstance(value, nn.Module):
            inside, own_back = _of_module(value)
            waiting += inside
            back += own_back
        elif isinstance(value, FunctionType):
            inside, names = _of_function(value)
            waiting += inside
            back += names
        elif isinstance(value, MethodType):
            inside, names = _of_method(value)
            waiting += inside
            back += names
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif (of_generator := _generator(value)) is not None:
            back.append(of_generator)
        else:
            if _is_of_threads(value):
                continue
            if isinstance(value, _CONTAINERS):
                back += kept_within(value)
                waiting += parts(value)
            elif isinstance(value, tuple):
                waiting += value
            if type(getattr(value, "__dict__", None)) is dict:
                back += kept_within(vars(value))
                waiting += vars(value).values()
    return tensors, back


def _is_of_threads(value: Any) -> bool:
    return any(c.__module__.partition(".")[0] in _OF_THREADS for c in type(value).__mro__)


def kept_within(holder: Any) -> list[_Back]:
    """What puts back what a container holds, and where the iterators among that are."""
    kind = _kind(holder)
    content: Any = _content(holder)
    if kind is set:
        return [partial(_refill, holder, content)]
    back: list[_Back] = []
    for key, value in [*content.items()] if isinstance(content, dict) else [*enumerate(content)]:
        live, later, rewind = rewound(value)
        if live is not value:
            kind.__setitem__(holder, key, live)
        content[key] = later
        if rewind is not None:
            back.append(rewind)
    return [partial(_refill, holder, content), *back]


def methods_of(modules: Iterable[nn.Module]) -> list[FunctionType]:
    """The methods of modules' classes, but those that PyTorch has."""
    classes = dict.fromkeys(c for kind in dict.fromkeys(map(type, modules)) for c in kind.__mro__)
    own = [c for c in classes if c is not object and c.__module__.partition(".")[0] != "torch"]
    return [f for c in own for f in vars(c).values() if isinstance(f, FunctionType)]


def _of_module(module: nn.Module) -> tuple[list[Any], list[_Back]]:
    """What a module holds but its parameters and hooks; what puts back its attributes and its parameters' gradients."""
    back = kept_within(vars(module))
    inside = [v for n, v in vars(module).items() if n != "_parameters" and not n.endswith("_hooks")]
    for p in module.parameters(recurse=False):
        back.append(partial(_set_gradient, p, p.grad, None if p.grad is None else p.grad.clone()))
    return inside, back


def _set_gradient(p: nn.Parameter, gradient: torch.Tensor | None, value: torch.Tensor | None) -> None:
    if gradient is not None and value is not None:
        gradient.detach().copy_(value)
    p.grad = gradient


def _of_function(function: FunctionType) -> tuple[list[Any], list[_Back]]:
    """What a function finds beside its arguments: what its closure, its defaults and its attributes hold, and the
    numbers, containers, tensors, iterators and functions of its own file among the globals that it names; and what puts
    these names back."""
    own = vars(function)
    back = kept_within(own)
    found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *own.values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            back += _kept_in(partial(setattr, cell, "cell_contents"), cell.cell_contents)
            found.append(cell.cell_contents)
    space = function.__globals__
    for name in function.__code__.co_names:
        value = space.get(name)
        if isinstance(value, (int, float, torch.Tensor, nn.Module, *_CONTAINERS)) or is_iterator(value):
            back += _kept_in(partial(space.__setitem__, name), value)
            found.append(space[name])
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
            found.append(value)
    return found, back


def _kept_in(hold: Callable[[Any], None], value: Any) -> list[_Back]:
    """What puts a value back where `hold` puts one."""
    live, later, rewind = rewound(value)
    if live is not value:
        hold(live)
    return [partial(hold, later), *([] if rewind is None else [rewind])]


def _of_method(method: MethodType) -> tuple[list[Any], list[_Back]]:
    """The attributes of a method's object that the method names, or that methods name which it names; and what puts
    these attributes back. The rest of the object is passed over: a trainer's loss leads to its data."""
    owner, own = method.__self__, getattr(method.__self__, "__dict__", None)
    if isinstance(owner, (*_PLAIN, nn.Module)) or type(own) is not dict:
        return [method.__func__, owner], []
    waiting: list[Any] = [method.__func__]
    functions: list[Any] = []
    named: set[str] = set()
    while waiting:
        function = waiting.pop()
        function = getattr(function, "fget", getattr(function, "__func__", function))  # of properties, class methods
        if not isinstance(function, FunctionType) or function in functions:
            continue
        functions.append(function)
        names = _names(function.__code__)
        waiting += [vars(c)[n] for c in type(owner).__mro__ for n in names if n in vars(c)]
        named |= names
    kept = named & own.keys()
    back = [one for name in kept for one in _kept_in(partial(own.__setitem__, name), own[name])]

    def leave_out() -> None:
        for name in named & own.keys() - kept:
            del own[name]

    return [*functions, *(own[name] for name in kept)], [leave_out, *back]


def _names(code: CodeType) -> set[str]:
    """The globals and attributes that code names, in strings too (`getattr(self, "calls")`), with those that the
    functions within name."""
    strings = (c for c in code.co_consts if isinstance(c, str))
    return {*code.co_names, *strings}.union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def parts(container: Any) -> list[Any]:
    """What a container holds; keys and values of a dict."""
    content = _content(container)
    return [*content, *content.values()] if isinstance(content, dict) else [*content]


def _kind(container: Any) -> Any:
    """The container of Python that this is one of."""
    return next(k for k in _CONTAINERS if isinstance(container, k))


def _content(container: Any) -> dict[Any, Any] | list[Any] | set[Any]:
    """What a container holds, in order, as a container of its own."""
    kind = _kind(container)
    if isinstance(container, dict):
        return dict(kind.items(container))
    return set(set.__iter__(container)) if kind is set else list(kind.__iter__(container))


def _refill(container: Any, content: Any) -> None:
    """Has a container hold again what it held; untouched where it does."""
    if list(map(id, parts(container))) != list(map(id, parts(content))):
        kind = _kind(container)
        kind.clear(container)
        if isinstance(content, dict):
            for key, value in content.items():
                kind.__setitem__(container, key, value)
        else:
            kind.update(container, content) if kind is set else kind.extend(container, content)


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _generator(value: Any) -> _Back | None:
    """What puts a generator of random numbers back to where it is; `None` for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _set(value, state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        at = copy.deepcopy(bits.state)
        return lambda: setattr(bits, "state", at)
    if isinstance(value, np.random.RandomState):
        of_numpy = copy.deepcopy(value.get_state(legacy=True))
        return lambda: value.set_state(of_numpy)
    if isinstance(value, random.Random) and type(value) is not random.SystemRandom:
        of_python = value.getstate()
        return lambda: value.setstate(of_python)
    return None
