"""What is done before somebody runs, saves, copies or loads a model otherwise than by its program."""

from __future__ import annotations

import contextlib
import copyreg
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_RUN_BY_PROGRAMS: list[nn.Module] = []
_HOOKED: weakref.WeakKeyDictionary[nn.Module, list[PreUseHooks]] = weakref.WeakKeyDictionary()
"""By module, the hooks that are on. Copying and pickling have no hooks of their own: modules of these classes are
reduced by `_reduced`, as `copyreg` allows."""
_PROTOCOL = 4


@contextlib.contextmanager
def by_its_program(model: nn.Module) -> Iterator[None]:
    """While it is open, it is its program that runs the model, and sees to what has to be done before."""
    _RUN_BY_PROGRAMS.append(model)
    try:
        yield
    finally:
        _RUN_BY_PROGRAMS.remove(model)


class PreUseHooks:
    """Calls `do` before one of some modules (a model, its loss), or a module in it, runs, is saved, copied, pickled or
    loaded into, once it is on; not where its program runs it."""

    def __init__(self, owners: Iterable[nn.Module], do: Callable[[], None]) -> None:
        self._owners = tuple(owners)
        self._do = do
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: list[nn.Module] = []

    def on(self) -> None:
        if self._hooks:
            return
        # Scripted modules take no hooks: what runs or saves one of them by itself is not seen.
        modules = dict.fromkeys(m for owner in self._owners for m in owner.modules())
        for module in (m for m in modules if not isinstance(m, torch.jit.ScriptModule)):
            self._hooks.append(module.register_forward_pre_hook(self._hook))
            self._hooks.append(module.register_state_dict_pre_hook(self._hook))  # type: ignore[no-untyped-call]
            self._hooks.append(module.register_load_state_dict_pre_hook(self._hook))  # type: ignore[no-untyped-call]
            _HOOKED.setdefault(module, []).append(self)
            self._hooked.append(module)
            if type(module) not in copyreg.dispatch_table:
                copyreg.pickle(type(module), _reduced)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """While it is open, nothing is called."""
        was_on = bool(self._hooks)
        for hook in self._hooks:
            hook.remove()
        for module in self._hooked:
            _HOOKED[module].remove(self)
        self._hooks.clear()
        self._hooked.clear()
        try:
            yield
        finally:
            if was_on:
                self.on()

    def _hook(self, *_: object) -> None:
        if not any(model is owner for model in _RUN_BY_PROGRAMS for owner in self._owners):
            self._do()


def _reduced(module: nn.Module) -> Any:
    """What `pickle` and `copy` make another module from: one without these hooks."""
    for hooks in tuple(_HOOKED.get(module, ())):
        hooks._hook()
    reduced = module.__reduce_ex__(_PROTOCOL)
    if not (_HOOKED.get(module) and isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict)):
        return reduced
    state = {name: _without(value) if name.endswith("_hooks") else value for name, value in reduced[2].items()}
    return *reduced[:2], state, *reduced[3:]


def _without(table: Any) -> Any:
    """A table of hooks without these."""
    if not isinstance(table, dict):
        return table
    return type(table)((n, hook) for n, hook in table.items() if not _is_own(hook))


def _is_own(hook: Any) -> bool:
    """Whether a hook is one of these; PyTorch wraps those before `load_state_dict`."""
    hook = getattr(hook, "hook", hook)
    return isinstance(getattr(hook, "__self__", None), PreUseHooks)
