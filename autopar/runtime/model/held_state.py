"""The state of Python objects that a module holds: kept before the module runs, and put back after."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from operator import is_
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.runtime.model.in_place import generator_back, is_filled, memory_back, slots_of
from autopar.runtime.model.iterators import Iterators, Rewindable, is_iterator


class KeptByProgram:
    """Of autopar's own objects that a hook on a model leads to: not the model's state, but its program's, which running
    or tracing the model may change."""


MOST = 20_000
"""Objects that are looked at, at most: a module may hold on to a data set."""

_CONTAINERS = (OrderedDict, dict, list, deque, set)
"""With their subclasses, as `Counter`; the first that one is an instance of reads and fills it, as what a subclass
overrides may do anything: `ACT2FN[name]` of Transformers makes a new module of what is held there."""
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, KeptByProgram)
_PASSED_OVER = (*_PLAIN, Rewindable)
_ATOMS = frozenset((str, bytes, bool, int, float, complex, type(None), type))
_NO_ITERATORS = _ATOMS | {dict, OrderedDict, list, set, tuple, torch.Tensor, nn.Parameter}
"""Exact classes whose objects are known without a closer look: most of what a module holds."""
_WRAPPERS = ("autopar.", "torch.nn.parallel.", "torch.distributed.")
"""Where modules come from that synchronize another one: what they count themselves goes on."""
_OF_THREADS = {"asyncio", "concurrent", "logging", "multiprocessing", "queue", "socket", "subprocess", "threading"}
"""Modules of Python whose objects, with those of their subclasses, other threads and processes change meanwhile: to put
these back would take away what has come into a queue."""
_Back = Callable[[], None]


def held_within(
    values: Iterable[Any], kept: Collection[nn.Module] | None = None, iterators: Iterators | None = None
) -> tuple[list[torch.Tensor], list[_Back]]:
    """The tensors that values hold, in containers and in attributes of objects; and what puts back, of each container,
    object and generator of random numbers, what it holds now. What programs keep is passed over, and so are modules and
    what threads share: queues, loggers, locks.

    `kept`: modules that are kept otherwise. Where it is given, others are not passed over: their buffers and parameters
    are among the tensors, and the gradients of these are put back.
    `iterators`: those that are kept already.
    """
    waiting = deque(values)  # what is near first, as it is no data set
    iterators = Iterators() if iterators is None else iterators
    known = set(map(id, kept or ()))
    tensors: list[torch.Tensor] = []
    back: list[_Back] = []
    held: list[Any] = []  # so that no other object gets an id that is known
    kinds: dict[int, tuple[bool, list[MemberDescriptorType]]] = {}  # of classes, by their ids
    empty: list[Any] = []
    while waiting and len(known) < MOST:
        value = waiting.popleft()
        if type(value) in _ATOMS:
            continue
        if _is_empty(value):
            empty.append(value)
            continue
        if isinstance(value, _PASSED_OVER) or id(value) in known or (kept is None and isinstance(value, nn.Module)):
            continue
        known.add(id(value))
        held.append(value)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, nn.Module) and type(value).__module__.startswith(_WRAPPERS):
            waiting.append(getattr(value, "module", None))
        elif isinstance(value, nn.Module):
            inside, own_back = _of_module(value, iterators)
            waiting += inside
            back += own_back
        elif isinstance(value, FunctionType):
            inside, names = _of_function(value, iterators)
            waiting += inside
            back += names
        elif isinstance(value, MethodType):
            inside, names = _of_method(value, iterators)
            waiting += inside
            back += names
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif (in_place := generator_back(value) or memory_back(value)) is not None:
            back.append(in_place)
        else:
            kind = type(value)
            if id(kind) not in kinds:
                kinds[id(kind)] = _is_of_threads(kind), slots_of(kind)
            of_threads, slots = kinds[id(kind)]
            if of_threads:
                continue
            if isinstance(value, _CONTAINERS):
                back += kept_within(value, iterators)
                waiting += parts(value)
            elif isinstance(value, tuple):
                waiting += value
            if type(getattr(value, "__dict__", None)) is dict:
                back += kept_within(vars(value), iterators)
                waiting += vars(value).values()
            for slot in (s for s in slots if is_filled(s, value)):
                back += _kept_in(partial(slot.__set__, value), slot.__get__(value), iterators)
                waiting.append(slot.__get__(value))
    return tensors, [partial(_empty_again, empty), *back]


def _is_empty(value: Any) -> bool:
    """Whether a value is a container of Python's own that holds nothing, as most of a module's tables of hooks."""
    kind = type(value)
    return kind in _CONTAINERS and not value and (kind is not OrderedDict or not vars(value))


def _empty_again(containers: Iterable[Any]) -> None:
    for one in filter(None, containers):
        one.clear()


def _is_of_threads(kind: type) -> bool:
    return any(c.__module__.partition(".")[0] in _OF_THREADS for c in kind.__mro__)


def kept_within(holder: Any, iterators: Iterators) -> list[_Back]:
    """What puts back what a container holds, and where the iterators among that are."""
    kind = _kind(holder)
    content: Any = _content(holder)
    if kind is set:
        return [partial(_refill, holder, content)]
    back: list[_Back] = []
    for key, value in [*content.items()] if isinstance(content, dict) else [*enumerate(content)]:
        if type(value) in _NO_ITERATORS:
            continue
        live, later, rewind = iterators.rewound(value)
        if live is not value:
            kind.__setitem__(holder, key, live)
        content[key] = later
        if rewind is not None:
            back.append(rewind)
    return [partial(_refill, holder, content), *back]


def of_classes(modules: Iterable[nn.Module], iterators: Iterators) -> tuple[list[Any], list[_Back]]:
    """The methods of modules' classes, but those that PyTorch has, and what else these classes hold; what puts their
    attributes back."""
    classes = dict.fromkeys(c for kind in dict.fromkeys(map(type, modules)) for c in kind.__mro__)
    found: list[Any] = []
    back: list[_Back] = []
    for of in classes:
        if of is object or of.__module__.partition(".")[0] == "torch":
            continue
        own = {n: v for n, v in vars(of).items() if not n.startswith("__")}
        kept = {n: v for n, v in own.items() if _is_state(v)}
        back.append(partial(_leave_out, of, own.keys()))
        for name, value in kept.items():
            back += _kept_in(partial(_set_of_class, of, name), value, iterators)
        found += [f for f in vars(of).values() if isinstance(f, FunctionType)]
        found += [vars(of)[name] for name in kept]
    return found, back


def _is_state(value: Any) -> bool:
    """Whether a value that stands under a name counts or collects something, or may come to."""
    kinds = (int, float, str, type(None), torch.Tensor, np.ndarray, nn.Module, *_CONTAINERS)
    return isinstance(value, kinds) or is_iterator(value)


def _set_of_class(of: type, name: str, value: Any) -> None:
    if vars(of).get(name) is not value:  # PyTorch knows classes by what they hold, and looks anew where that is set
        type.__setattr__(of, name, value)


def _leave_out(of: type, names: Collection[str]) -> None:
    for name, value in [*vars(of).items()]:
        if name not in names and not name.startswith("__") and _is_state(value):
            type.__delattr__(of, name)


def _of_module(module: nn.Module, iterators: Iterators) -> tuple[list[Any], list[_Back]]:
    """What a module holds but its hooks; what puts back its attributes and its parameters' gradients."""
    back = kept_within(vars(module), iterators)
    inside = [v for n, v in vars(module).items() if not n.endswith("_hooks")]
    for p in module.parameters(recurse=False):
        back.append(partial(_set_gradient, p, p.grad, None if p.grad is None else p.grad.clone()))
    return inside, back


def _set_gradient(p: nn.Parameter, gradient: torch.Tensor | None, value: torch.Tensor | None) -> None:
    if gradient is not None and value is not None:
        gradient.detach().copy_(value)
    p.grad = gradient


def _of_function(function: FunctionType, iterators: Iterators) -> tuple[list[Any], list[_Back]]:
    """What a function finds beside its arguments: what its closure, its defaults and its attributes hold, and the
    numbers, containers, tensors, arrays, iterators, objects of its own package and functions of its own file among the
    globals that it names; and what puts these names back."""
    own = vars(function)
    back = kept_within(own, iterators)
    found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *own.values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            back += _kept_in(partial(setattr, cell, "cell_contents"), cell.cell_contents, iterators)
            found.append(cell.cell_contents)
    space = function.__globals__
    for name in function.__code__.co_names:
        if name not in space:
            continue
        value = space[name]
        if _is_state(value) or _is_of_package(value, function):
            back += _kept_in(partial(space.__setitem__, name), value, iterators)
            found.append(space[name])
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
            found.append(value)
    return found, back


def _is_of_package(value: Any, function: FunctionType) -> bool:
    """Whether a global is an object of the function's own package: what others hand out may be anybody's."""
    package = str(function.__module__).partition(".")[0]
    kind = type(value)
    return kind.__module__.partition(".")[0] == package and not isinstance(value, (type, FunctionType))


def _kept_in(hold: Callable[[Any], None], value: Any, iterators: Iterators) -> list[_Back]:
    """What puts a value back where `hold` puts one."""
    live, later, rewind = iterators.rewound(value)
    if live is not value:
        hold(live)
    return [partial(hold, later), *([] if rewind is None else [rewind])]


def _of_method(method: MethodType, iterators: Iterators) -> tuple[list[Any], list[_Back]]:
    """The attributes of a method's object that the method names, or that methods name which it names; and what puts
    these attributes back. The rest of the object is passed over: a trainer's loss leads to its data."""
    owner, own = method.__self__, getattr(method.__self__, "__dict__", None)
    if isinstance(owner, (*_PLAIN, nn.Module)) or type(own) is not dict:
        return [method.__func__, owner], []
    waiting: list[Any] = [method.__func__]
    functions: list[Any] = []
    found: list[Any] = []  # in its classes
    named: set[str] = set()
    while waiting:
        function = waiting.pop()
        function = getattr(function, "fget", getattr(function, "__func__", function))  # of properties, class methods
        if not isinstance(function, FunctionType) or function in functions:
            continue
        functions.append(function)
        names = _names(function.__code__)
        of_class = [vars(c)[n] for c in type(owner).__mro__ for n in names if n in vars(c)]
        waiting += of_class
        found += filter(_is_state, of_class)
        named |= names
    kept = named & own.keys()
    back = [one for name in kept for one in _kept_in(partial(own.__setitem__, name), own[name], iterators)]

    def leave_out() -> None:
        for name in named & own.keys() - kept:
            del own[name]

    return [*functions, *found, *(own[name] for name in kept)], [leave_out, *back]


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
    kind = type(container)
    return kind if kind in _CONTAINERS else next(k for k in _CONTAINERS if isinstance(container, k))


def _content(container: Any) -> dict[Any, Any] | list[Any] | set[Any]:
    """What a container holds, in order, as a container of its own."""
    kind = _kind(container)
    if isinstance(container, dict):
        return dict(kind.items(container))
    return set(set.__iter__(container)) if kind is set else list(kind.__iter__(container))


def _refill(container: Any, content: Any) -> None:
    """Has a container hold again what it held; untouched where it does."""
    kind = _kind(container)
    if not _is_as_it_was(container, content, kind):
        kind.clear(container)
        if isinstance(content, dict):
            for key, value in content.items():
                kind.__setitem__(container, key, value)
        else:
            kind.update(container, content) if kind is set else kind.extend(container, content)


def _is_as_it_was(container: Any, content: Any, kind: Any) -> bool:
    """Whether a container holds the same objects as its kept content."""
    if kind.__len__(container) != len(content):
        return False
    if isinstance(content, dict):
        return all(map(is_, kind.keys(container), content)) and all(map(is_, kind.values(container), content.values()))
    return all(map(is_, kind.__iter__(container), content))
