"""Parameters on their way between two steps: sent as one step ends, received in the next one's forward pass, just
before it reads them, or when somebody else wants to.

Receiving is each rank's own matter, for the collective is under way already. So whoever runs or saves the model in
between need not ask the other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from autopar.backends import collectives
from autopar.ops.updates import Received
from autopar.runtime.model.held_state import KeptByProgram
from autopar.runtime.model.pre_use_hooks import PreUseHooks


class Deferred(nn.Module):
    """What is on its way of one sync group."""

    def __init__(self, store: Received | None) -> None:
        super().__init__()
        self.store = store
        """`None` where the rank has the parameters already, and only completes the collective."""
        self._flat: torch.Tensor | None = None

    def forward(self, flat: torch.Tensor | None = None) -> None:
        """Keeps the result of a collective that was begun; without one, waits for what is kept, and stores it."""
        if flat is None and self._flat is not None:
            found = collectives.wait(self._flat)
            if self.store is not None:
                self.store(found)
        self._flat = flat


class DeferredParameters(KeptByProgram):
    """All groups of a program, whichever of its graphs begins or completes a step."""

    def __init__(self, model: nn.Module) -> None:
        self._groups: dict[int, Deferred] = {}
        self._hooks = PreUseHooks(model, self.arrive)

    def of(self, group: int, store: Received | None) -> Deferred:
        """A sync group's, by its index: the same for every graph."""
        if group not in self._groups:
            self._groups[group] = Deferred(store)
            self._hooks.on()
        return self._groups[group]

    @torch.no_grad()
    def arrive(self) -> None:
        """Completes what is on its way."""
        for deferred in self._groups.values():
            deferred()

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """While it is open, the model runs without looking what is on its way: only shapes are looked at."""
        with self._hooks.off():
            yield
