"""What an optimizer's `step()` reads and changes besides parameters and their state: settings of groups, attributes.

A program runs `step()` of a copy for each part of the parameters, several times in one step of the program. Each run
begins with what the user's optimizer has then, so that all count from the same numbers, and what they have changed is
written back once, as one `step()` on all parameters would leave it. Runs that leave different values are refused.

PyTorch's own optimizers change nothing of the kind, and are run as they are.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import OptimizerError
from autopar.runtime.model.held_state import held_within, parts
from autopar.runtime.optimizers.joint_optimizer import JointOptimizer, each_of

_MANAGED = frozenset(
    [
        "state",
        "param_groups",
        "defaults",
        "step",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_need_device_dtype_check_for_fused",
    ]
)
"""Attributes that a program gives to its copies itself, or that are PyTorch's own business."""
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, ModuleType)
_GONE = object()
"""Stands for what was there and is no more."""
_MOST = 1000
"""Objects within one attribute that are looked at for changes in place."""

Changes = dict[Any, Any]


class OwnSettings:
    """What copies of one of the user's optimizers share, from one step of a program to the next."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._of = optimizer
        self._changes_nothing = type(optimizer).__module__.startswith("torch.optim")
        self._found: dict[int, tuple[bool, Changes]] = {}
        """What runs have changed in this step, of each group and, by -1, besides; and whether a run that updated some
        of the group's parameters has."""
        self._in_place: str | None = None
        self._runs = 0
        self._given: Changes = {}
        """The user's optimizer's settings that belong to no group."""
        self.begin()

    def begin(self) -> None:
        """Before a step of the program."""
        self._found, self._in_place, self._runs = {}, None, 0
        if not self._changes_nothing:
            self._given = _settings(self._of)

    def step(self, part: Optimizer) -> None:
        """Runs `part`, a copy of the optimizer, on its parameters that have a gradient. Raises `OptimizerError` where
        that changes other settings than another run did in this step, or some in place that runs share."""
        if self._changes_nothing:
            part.step()
            return
        if self._in_place is not None:
            raise OptimizerError(
                f"{self._name} changes {self._in_place} in place in its step(), which runs several times in a step of "
                f"the program, once for each part of the parameters. {_ADVICE}"
            )
        self._give(part)
        updates = [any(p.grad is not None for p in g["params"]) for g in part.param_groups]
        inside = [(name, value, _inside(value)) for name, value in self._in_hand()]
        part.step()
        self._runs += 1
        for name, value, before in inside:
            if _inside(value)[0] != before[0]:
                self._in_place = name
        self._vote(-1, True, _changes(self._given, _settings(part)))
        for i, (mine, group) in enumerate(zip(part.param_groups, self._of.param_groups, strict=True)):
            self._vote(i, updates[i], _changes(_of_group(group), _of_group(mine)))

    def end(self, steps: bool) -> None:
        """Behind a step of the program: writes to the user's optimizer what its runs have changed. `steps`: whether the
        optimizer makes a step in it, also where no part has a gradient on this rank."""
        if self._changes_nothing:
            return
        if not self._runs and steps:
            with contextlib.suppress(Exception):  # one that cannot count without parameters counts where there are some
                self.step(bare_copy(self._of))
        for i, (_, changed) in self._found.items():
            for key, value in changed.items():
                if i >= 0:
                    _set(self._of.param_groups[i], key, value)
                else:
                    kind, name = key
                    _set(vars(self._of) if kind == "attributes" else self._of.state, name, value)
        self.begin()

    def check_saved(self) -> None:
        """Raises `OptimizerError` where a checkpoint would leave out what the optimizer keeps in its state."""
        for key in _own_keys(self._of.state):
            raise OptimizerError(
                f"{self._name} keeps {key!r} in its state, which belongs to no parameter: a checkpoint does not hold "
                "it. Keep it in the parameter groups (group['name'])"
            )

    @property
    def _name(self) -> str:
        return type(self._of).__name__

    def _give(self, part: Optimizer) -> None:
        """Sets a copy's settings to those of the user's optimizer."""
        _make_alike(vars(part), vars(self._of), _MANAGED)
        for mine, group in zip(part.param_groups, self._of.param_groups, strict=True):
            _make_alike(mine, group, frozenset(["params"]))
        for key in _own_keys(part.state):
            del part.state[key]
        part.state.update((key, value) for (kind, key), value in self._given.items() if kind == "state")

    def _in_hand(self) -> list[tuple[str, Any]]:
        """The settings that may change in place, and what they are called."""
        found = [(f"'{key}' of its {kind}", v) for (kind, key), v in self._given.items() if not _is_constant(v)]
        groups = (_of_group(group) for group in self._of.param_groups)
        return found + [(f"'{k}' of a parameter group", v) for g in groups for k, v in g.items() if not _is_constant(v)]

    def _vote(self, i: int, updates: bool, changed: Changes) -> None:
        before = self._found.get(i)
        if before is None or (updates and not before[0]):
            self._found[i] = updates, changed
        elif updates == before[0]:
            for key in {**before[1], **changed}:
                a, b = before[1].get(key, _UNCHANGED), changed.get(key, _UNCHANGED)
                if not _alike(a, b):
                    what = f"parameter group {i}'s '{key}'" if i >= 0 else f"'{key[1]}' of its {key[0]}"
                    raise OptimizerError(
                        f"{self._name} sets {what} in its step(), to {_shown(a)} for some of the parameters and to "
                        f"{_shown(b)} for others, which a program updates apart from each other. {_ADVICE}"
                    )


_UNCHANGED = object()
_ADVICE = (
    "Keep what belongs to a parameter in self.state[p], count in numbers that each step() sets anew (self.n += 1, "
    'group["n"] += 1), or leave the optimizer out of optimize() and step it yourself'
)


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """The optimizer with its settings and groups, but without parameters or their state."""
    if isinstance(optimizer, JointOptimizer):
        return JointOptimizer([bare_copy(o) for o in optimizer.each])
    found = object.__new__(type(optimizer))
    vars(found).update(vars(optimizer))  # copy.copy would leave out what a subclass has of its own
    # What a learning-rate scheduler or a hook hung on the user's optimizer must not run once per copy.
    found.__dict__.pop("step", None)
    found._optimizer_step_pre_hooks = OrderedDict()
    found._optimizer_step_post_hooks = OrderedDict()
    found.state = defaultdict(dict, _own_keys(optimizer.state))
    found.param_groups = [{**g, "params": []} for g in optimizer.param_groups]
    return found


def kept_settings(optimizer: Optimizer) -> Callable[[], None]:
    """Keeps the settings of the user's optimizer as they are, contents included; what is returned puts them back."""
    back = [_kept(one) for one in each_of(optimizer)]

    def put_back() -> None:
        for one in back:
            one()

    return put_back


def _kept(optimizer: Optimizer) -> Callable[[], None]:
    settings, groups = _settings(optimizer), [_of_group(g) for g in optimizer.param_groups]
    every: list[dict[Any, Any]] = [settings, *groups]
    values = [v for of in every for v in of.values() if not _is_constant(v)]
    tensors, contents = held_within(values)
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    of_tensors = [(t, t.detach().clone()) for t in tensors if id(t) not in held]

    def put_back() -> None:
        for (kind, key), value in _changes(_settings(optimizer), settings).items():
            _set(vars(optimizer) if kind == "attributes" else optimizer.state, key, value)
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            for key, value in _changes(_of_group(group), own).items():
                _set(group, key, value)
        for content in contents:
            content()
        with torch.no_grad():
            for tensor, before in of_tensors:
                tensor.copy_(before)

    return put_back


def _settings(optimizer: Optimizer) -> dict[tuple[str, Any], Any]:
    """What belongs to no group: attributes, and what the state has under other keys than parameters."""
    own = {k: v for k, v in vars(optimizer).items() if k not in _MANAGED and not k.startswith("_optimizer_")}
    return {("attributes", k): v for k, v in own.items()} | {
        ("state", k): v for k, v in _own_keys(optimizer.state).items()
    }


def _of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _own_keys(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a state has under other keys than parameters."""
    return {k: v for k, v in state.items() if type(k) is not nn.Parameter and not isinstance(k, torch.Tensor)}


def _changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Changes:
    """What is another object after than before."""
    found = {k: v for k, v in after.items() if before.get(k, _GONE) is not v}
    return found | dict.fromkeys(before.keys() - after.keys(), _GONE)


def _set(of: Any, key: Any, value: Any) -> None:
    if value is _GONE:
        of.pop(key, None)
    else:
        of[key] = value


def _make_alike(mine: dict[str, Any], theirs: Mapping[str, Any], but: frozenset[str]) -> None:
    for key in mine.keys() - theirs.keys() - but:
        del mine[key]
    mine.update((k, v) for k, v in theirs.items() if k not in but)


def _is_constant(value: Any) -> bool:
    """Whether a value cannot change in place, as far as an optimizer's `step()` is concerned."""
    return isinstance(value, (*_CONSTANTS, nn.Module)) or (type(value) is tuple and all(map(_is_constant, value)))


def _inside(value: Any) -> tuple[list[Any], list[Any]]:
    """What is other where something within a value has changed in place, but for parameters; and what keeps that
    alive, so that no other object gets its place."""
    found: list[Any] = []
    alive: list[Any] = []
    waiting, known = [value], set[int]()
    while waiting and len(alive) < _MOST:
        one = waiting.pop()
        if isinstance(one, _CONSTANTS):
            found.append(one)
            continue
        found.append(id(one))
        if id(one) in known or isinstance(one, (nn.Parameter, nn.Module)):
            continue
        known.add(id(one))
        alive.append(one)
        if isinstance(one, torch.Tensor):
            found.append(0 if one.is_inference() else one._version)
        elif isinstance(one, (list, dict, set, tuple, deque)):
            waiting += parts(one)
        elif type(getattr(one, "__dict__", None)) is dict:
            waiting += parts(vars(one))
    return found, alive


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        return False


def _shown(value: Any) -> str:
    return "nothing" if value is _GONE else "what it was" if value is _UNCHANGED else repr(value)
