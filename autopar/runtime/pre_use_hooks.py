"""What is done before somebody runs, saves or loads a model otherwise than by its program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn


class PreUseHooks:
    """Calls `do` before the model runs, is saved or is loaded into, once it is on."""

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
        self._do()
