"""What Python held when a graph was captured, and may since hold otherwise: attributes, globals, closures, modes.

A captured graph has the values of all Python objects that the model has read written into it: a dropout's probability,
a loss weight that is annealed, a global. TorchDynamo records each such reading as a guard. They are built into one
check, which runs in C++ (80 us for a BERT of 12 layers), and asked before each step.

Left out are the guards on the batch's tensors, on parameters and on buffers, which `Signature` and the runtime look at,
and on PyTorch's global state, of which `global_state` keeps what changes a graph. Other tensors are constants of the
graph, which may change in place: they are held to be the same objects.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder, get_verbose_code_parts
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, GenericAttrSource, NumpyTensorSource
from torch._guards import ChainedSource

from autopar.ir.compat import at_trace_end, guards_attribute_itself
from autopar.ir.constants import PLAIN, constant

_ON_TENSORS = ("TENSOR_MATCH", "TENSOR_SUBCLASS_METADATA_MATCH")
_OWN = "L['self']"
_MODULE = r"L\['self'\](?:(?:\.__dict__\['_modules'\]|\._modules)\['[^']+'\])*"
_REGISTERED = re.compile(_MODULE + r"(?:\.__dict__\['_(?:parameters|buffers)'\]|\._(?:parameters|buffers))\['[^']+'\]")
"""Names of parameters and buffers of the model and of the loss."""
_OF_LIBRARIES = ("transformers.", "torch.")
"""How names of what libraries do for themselves begin: no user reads it."""
_OTHERS = ("L['tensors']", "_validate_args")
"""In names of what is looked at elsewhere, and of what is otherwise for the time of a capture alone."""
_OUR_OWN = re.compile(
    r"G\['__(?:import_autopar(?:_dot_|'\])|builtins_dict_)|L\['self'\](?:\.__dict__\[')?\.?(?:_batch|_mode|_outputs|apart|assigned|copied)\b"
)
"""How names begin of what the step holds for itself beside the model and the loss, and of Python's own functions:
nobody changes these."""
_TABLE = re.compile(_MODULE + r"(?:\.__dict__\['_(?:parameters|buffers|modules)'\]|\._(?:parameters|buffers|modules))")
"""Names of the tables that a registered module holds: what is in them is looked at, and they are dicts for good."""


@dataclass(frozen=True)
class Effect:
    """Something that the traced code does to a Python object, which running the graph does not do."""

    what: str
    """As a user would write it: `model.calls`."""
    before: Any
    after: Any
    """The values, where they are constants; else both are `None`."""
    owner: Any = None
    """The object whose attribute it is; `None` for an element of a container."""

    def set(self, value: Any) -> None:
        """Has the attribute hold `value`."""
        setattr(self.owner, self.what.rpartition(".")[2], value)

    @property
    def grows(self) -> bool:
        """Whether running the code sets a constant to another value than it had, as a counter does."""
        return self.owner is not None and type(self.before) is type(self.after) and self.before != self.after


class Guards:
    """Tells whether a captured graph still is what tracing the model would give."""

    def __init__(
        self, step: nn.Module, check: Any, read: frozenset[str], effects: tuple[Effect, ...], held: list[Any]
    ) -> None:
        """`held`: what the check knows by address."""
        self._check = check
        self._held = held
        self._scope = {"self": step, "tensors": ()}
        self._functions = _functions(step)
        self.effects = effects
        self.counters = tuple(e for e in effects if e.grows and e.what in read)
        """Of the effects, those on what the code itself has read: it computes something else the next time."""

    @property
    def lost(self) -> list[str]:
        """What the traced code does to the user's Python objects, less to buffers, which the graph writes."""
        words = (e.what for e in self.effects)
        return [w for w in words if not w.startswith(_OF_LIBRARIES) and not w.endswith("._buffers")]

    def changed(self) -> str | None:
        """What is other than it was at capture, in words; `None` where all is as it was."""
        for functions in self._functions:
            if (name := functions.changed()) is not None:
                return f"{functions.of.__qualname__}.{name} is another function than at capture"
        if self._check.guard_manager.check(self._scope):
            return None
        found = self._check.guard_manager.check_verbose(self._scope).verbose_code_parts
        return _words(found[0]) if found else "something that the model reads"


def guards_of(captured: Any, step: nn.Module, effects: list[Effect], rewritten: bool = False) -> Guards:
    """The guards of what TorchDynamo has captured (`GraphCaptureOutput`); to be called while its metrics are kept.
    `rewritten`: whether functions have other code for the time of the capture, so that theirs is not to be held to."""
    output = captured.output_graph
    left_out = (*_ON_TENSORS, "CLOSURE_MATCH") if rewritten else _ON_TENSORS
    guards = {_of_identity(g) if _is_constant(g) else _exactly(g) for g in output._guards}
    kept = {_direct(g) for g in guards if _is_kept(g, left_out)}
    output._guards.inner = type(output._guards.inner)(kept)
    output.skip_guards_check = True  # which would look for the tensors
    with _held_objects() as held:
        check = captured.build_guards(type(step).forward.__code__)
    return Guards(step, check, frozenset(_plain(g.name) for g in kept), tuple(effects), held)


@contextmanager
def _held_objects() -> Iterator[list[Any]]:
    """Within it, the objects that guards know by their addresses are added to the list, which is to live as long as the
    guards: another object may get the address of one that is gone. PyTorch has each object call the guards when it
    goes instead, and so keeps guards, with all that was traced, as long as the model lives."""
    held: list[Any] = []
    original = CheckFunctionManager.id_ref

    def id_ref(self: CheckFunctionManager, obj: object, obj_str: str) -> int:
        held.append(obj)
        with suppress(TypeError):  # of what cannot be referred to weakly, a bool
            self._weakrefs[id(obj)] = weakref.ref(obj)
        return id(obj)

    CheckFunctionManager.id_ref = id_ref  # type: ignore[method-assign]
    try:
        yield held
    finally:
        CheckFunctionManager.id_ref = original  # type: ignore[method-assign]


@contextmanager
def seen_effects() -> Iterator[list[Effect]]:
    """Within it, what captured code does to Python objects is added to the list."""
    found: list[Effect] = []
    at_end = at_trace_end(OutputGraph)
    original = getattr(OutputGraph, at_end)

    def look(self: OutputGraph, *args: Any, **settings: Any) -> Any:
        result = original(self, *args, **settings)
        found[:] = _effects(self.side_effects)
        return result

    setattr(OutputGraph, at_end, look)
    try:
        yield found
    finally:
        setattr(OutputGraph, at_end, original)


def global_state() -> tuple[Any, ...]:
    """What of PyTorch's global state a graph depends on."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return (
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


class _Functions:
    """The functions that a class holds, and of `forward` and `__call__`, that it has none."""

    def __init__(self, of: type) -> None:
        self.of = of
        self._held = {n: f for n, f in vars(of).items() if isinstance(f, FunctionType)}
        self._get: Callable[[Any], Any] = itemgetter(*self._held) if self._held else lambda _: None
        self._before = self._get(vars(of))
        self._absent = [n for n in ("forward", "__call__") if n not in self._held]

    def changed(self) -> str | None:
        """The name of one that is other than it was; `None` where all are as they were."""
        own = vars(self.of)
        try:
            same = self._get(own) == self._before
        except KeyError:
            same = False
        for name in self._absent if same else self._held:
            if own.get(name) != self._held.get(name):
                return name
        return None


def _functions(step: nn.Module) -> list[_Functions]:
    """Those of classes of modules, less PyTorch's, for TorchDynamo does not look at them."""
    classes = dict.fromkeys(of for m in step.modules() for of in type(m).__mro__)
    return [
        _Functions(of) for of in classes if of is not object and not of.__module__.startswith(("torch.", "autopar."))
    ]


def _is_constant(guard: Any) -> bool:
    """Whether it is on a tensor that the graph holds for itself."""
    return guard.create_fn_name() == "TENSOR_MATCH" and not (
        guard.name.startswith("L['tensors']") or _REGISTERED.fullmatch(guard.name)
    )


def _of_identity(guard: Any) -> Any:
    """In the place of a guard on a tensor's properties, one on the object: of an array of numpy's, on that."""
    source = guard.originating_source
    while isinstance(source, NumpyTensorSource):
        source = source.base
    found = source.make_guard(GuardBuilder.ID_MATCH)
    found.stack, found.user_stack = guard.stack, guard.user_stack
    return found


def _exactly(guard: Any) -> Any:
    """In the place of a guard by `==`, one that also tells apart what is written otherwise: to Python `(1, 2)` equals
    `(True, 2.0)`, and 0.0 equals -0.0."""
    name = guard.create_fn_name()
    if name not in ("EQUALS_MATCH", "CONSTANT_MATCH"):
        return guard
    found = guard.originating_source.make_guard(_AS_WRITTEN[name])
    found.stack, found.user_stack = guard.stack, guard.user_stack
    return found


def _direct(guard: Any) -> Any:
    """In the place of a guard on an attribute, one that reads it from its object where the class has a function of its
    own for all attributes, as configurations of Transformers: what that function reads has guards of its own, and it
    would be called in each step, for each attribute."""
    source, create = guard.originating_source, guard.create_fn
    if not isinstance(source, ChainedSource):
        return guard

    on_attribute = guard.create_fn_name() == "HASATTR" and guards_attribute_itself(GuardBuilder)

    @wraps(create)
    def match(builder: GuardBuilder, _: Any) -> None:
        if on_attribute:
            read = replace(source, base=_read_directly(source.base, builder))
        else:
            read = _read_directly(source, builder)
        found = read.make_guard(create)
        found.stack, found.user_stack = guard.stack, guard.user_stack
        create(builder, found)

    made = source.make_guard(match)
    made.stack, made.user_stack = guard.stack, guard.user_stack
    return made


def _read_directly(source: Any, builder: GuardBuilder) -> Any:
    if not isinstance(source, ChainedSource):
        return source
    base = _read_directly(source.base, builder)
    if type(source) is AttrSource:
        owner = builder.get(source.base)
        if isinstance(type(owner).__getattribute__, FunctionType) and source.member in getattr(owner, "__dict__", {}):
            return GenericAttrSource(base, source.member)
    return source if base is source.base else replace(source, base=base)


def _as_written(equals: Callable[[GuardBuilder, Any], None]) -> Callable[[GuardBuilder, Any], None]:
    def match(builder: GuardBuilder, guard: Any) -> None:
        equals(builder, guard)
        value = builder.get(guard)
        if not (
            isinstance(value, (tuple, list, set, frozenset)) or (isinstance(value, (float, complex)) and not value)
        ):
            return
        words = get_verbose_code_parts(f"{guard.name} == {value!r}", guard)
        builder.get_guard_manager(guard).add_lambda_guard(_written_as(value), words, guard.user_stack)

    return match


def _written_as(value: Any) -> Callable[[Any], bool]:
    """Tells a value that equals this one and is of its kind from what is written otherwise; before each step."""
    if isinstance(value, (float, complex)) or (type(value) in (tuple, list) and all(type(v) in PLAIN for v in value)):
        written = repr(value)
        return lambda v: repr(v) == written
    known, _ = constant(value)
    return lambda v: constant(v)[0] == known


_AS_WRITTEN = {n: _as_written(getattr(GuardBuilder, n)) for n in ("EQUALS_MATCH", "CONSTANT_MATCH")}


def _is_kept(guard: Any, left_out: tuple[str, ...]) -> bool:
    """Guards without a name are those on PyTorch's global state."""
    name: str = guard.name
    kind = guard.create_fn_name()
    others = (
        _OUR_OWN.match(name) or any(o in name for o in _OTHERS) or (kind == "TYPE_MATCH" and _TABLE.fullmatch(name))
    )
    return bool(name) and not others and kind not in left_out


def _effects(side_effects: Any) -> list[Effect]:
    found = []
    for changed in side_effects._get_modified_vars():
        name = _name(changed)
        if name is None or not ("G[" in name or _OWN in name):
            continue
        attributes = side_effects.store_attr_mutations.get(changed, {})
        for attribute, value in attributes.items():
            held = getattr(getattr(changed, "value", None), attribute, None)
            constant = value.is_python_constant()
            before, after = (held, value.as_python_constant()) if constant else (None, None)
            found.append(Effect(f"{_plain(name)}.{attribute}", before, after, changed.value if constant else None))
        if name.endswith("._buffers"):
            found += [Effect(f"{_plain(name.removesuffix('._buffers'))}.{b}", None, None) for b in _registered(changed)]
        if not attributes:
            found.append(Effect(_plain(name), None, None))
    return found


def _registered(buffers: Any) -> list[str]:
    """Of a module's table of buffers, the names that the code has added, or taken away."""
    before = {key.as_python_constant() for key in buffers.original_items}
    return sorted(before ^ {key.vt.as_python_constant() for key in buffers.items})


def _name(changed: Any) -> str | None:
    """Where an object lies; `None` of one that the code has made, and of PyTorch's stack of function modes, which is as
    it was when a `with torch.device(...)` ends."""
    try:
        return getattr(getattr(changed, "source", None), "name", None)
    except NotImplementedError:
        return None


_REWRITES = (
    (re.compile(r"dict\(type\((.+?)\)(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]"), r"\1.\2"),  # of its class
    (re.compile(r"L\['self'\](?:\.__dict__\['_modules'\]|\._modules)\['model'\]"), "model"),
    (re.compile(r"L\['self'\](?:\.__dict__\['_modules'\]|\._modules)\['loss_fn'\]|L\['self'\]\.loss_fn"), "loss_fn"),
    (
        re.compile(r"(?:\.__dict__\['_(?:modules|parameters|buffers)'\]|\._(?:modules|parameters|buffers))\['(\w+)'\]"),
        r".\1",
    ),
    (re.compile(r"\.__dict__\['(\w+)'\]"), r".\1"),
    (re.compile(r"G\['__import_(\w+)'\]"), r"\1"),
    (re.compile(r"G\['(\w+)'\]"), r"\1"),
    (re.compile(r"(_hooks)\[list\(dict\.keys\(.*?\)\)\[(\d+)\]\]"), r"\1[\2]"),
    (re.compile(r"___check_obj_id\((.+), \d+\), type=.*"), r"\1 is the same object"),
)


def _plain(source: str) -> str:
    """A source of TorchDynamo's as a user would write it."""
    for pattern, word in _REWRITES:
        source = pattern.sub(word, source)
    return source.replace("_dot_", ".")


def _words(guard: str) -> str:
    """A guard that failed, with the line that has read the value."""
    condition, *comments = (part.strip() for part in guard.split("  # "))
    where = f" (read at {comments[-1]})" if comments else ""
    return f"'{_plain(condition)}' held at capture, and no longer holds{where}"
