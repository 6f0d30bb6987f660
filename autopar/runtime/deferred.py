"""Parameters on their way between two steps: sent as one step ends, received in the next one's forward pass, just
before it reads them, or when somebody else wants to.

Receiving is each rank's own matter, for the collective is under way already. So whoever runs or saves the model in
between need not ask the other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from autopar.backends import collectives
from autopar.errors import PlanError
from autopar.ops.fragments import Fragment
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

    @property
    def coming(self) -> tuple[Fragment, ...]:
        """What the rank will receive."""
        return () if self.store is None or self._flat is None else self.store.fragments


class DeferredParameters(KeptByProgram):
    """All groups of a program, whichever of its graphs begins or completes a step."""

    def __init__(self, owners: Iterable[nn.Module]) -> None:
        self._groups: dict[int, Deferred] = {}
        self._left: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}
        """Parameters that are on their way, by name, as the last step has left them."""
        self._hooks = PreUseHooks(owners, self.arrive)

    def of(self, group: int, store: Received | None) -> Deferred:
        """A sync group's, by its index: the same for every graph."""
        if group not in self._groups:
            self._groups[group] = Deferred(store)
            self._hooks.on()
        return self._groups[group]

    def leave(self) -> None:
        """Remembers how a step has left the parameters that are on their way."""
        coming = (f for group in self._groups.values() for f in group.coming)
        self._left = {f.name: (f.parameter, _written(f.parameter)) for f in coming if f.parameter is not None}

    def check(self) -> None:
        """Before they are received: raises `PlanError` where one of them was written to, which would be lost."""
        left, self._left = self._left, {}
        for name, (parameter, written) in left.items():
            if _written(parameter) != written:
                raise PlanError(
                    f"'{name}' was written to while its updated values were on their way from the last step, and would "
                    "be overwritten by them: call program.synchronize() before you write to parameters, or leave "
                    "late_parameters out"
                )

    @torch.no_grad()
    def arrive(self) -> None:
        """Completes what is on its way."""
        self.check()
        for deferred in self._groups.values():
            deferred()

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """While it is open, the model runs without looking what is on its way: only shapes are looked at."""
        with self._hooks.off():
            yield


def _written(parameter: torch.Tensor) -> tuple[int, int]:
    """Another one after each change in place, and where it was given other memory."""
    return parameter._version, parameter.data_ptr()
