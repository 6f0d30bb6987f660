"""What is done before somebody runs, saves or loads a model otherwise than by its program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

_RUN_BY_PROGRAMS: list[nn.Module] = []


@contextlib.contextmanager
def by_its_program(model: nn.Module) -> Iterator[None]:
    """While it is open, it is its program that runs the model, and sees to what has to be done before."""
    _RUN_BY_PROGRAMS.append(model)
    try:
        yield
    finally:
        _RUN_BY_PROGRAMS.remove(model)


class PreUseHooks:
    """Calls `do` before the model runs, is saved or is loaded into, once it is on; not where its program runs it."""

    def __init__(self, model: nn.Module, do: Callable[[], None]) -> None:
        self._model = model
        self._do = do
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def on(self) -> None:
        if not self._hooks:
            self._hooks.append(self._model.register_forward_pre_hook(self._hook))
            self._hooks.append(self._model.register_state_dict_pre_hook(self._hook))  # type: ignore[no-untyped-call]
            self._hooks.append(self._model.register_load_state_dict_pre_hook(self._hook))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """While it is open, nothing is called."""
        was_on = bool(self._hooks)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            yield
        finally:
            if was_on:
                self.on()

    def _hook(self, *_: object) -> None:
        if not any(model is self._model for model in _RUN_BY_PROGRAMS):
            self._do()
