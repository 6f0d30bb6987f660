"""A drop-in module that runs its model eagerly: gradients are synchronized beside the user's own backward pass.

Hooks on the parameters' gradient accumulators, as DDP has them, run what was written into the model's outline: the
first gradient of a backward pass begins it, and the pass's end completes it. What lay in `grad` before is put aside
meanwhile, and the synchronized gradient added to it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from autopar.errors import AutoparWarning
from autopar.ir.capture import output_tensors
from autopar.runtime.eager_steps import Run

if TYPE_CHECKING:
    from autopar.runtime.eager_model import EagerModel

Guard = contextlib.AbstractContextManager[None]
Begin = Callable[[float], Run | None]
"""Begins to synchronize a backward pass of a batch that counts so much; `None` where it is to be kept to this rank."""
End = Callable[[Mapping[str, torch.Tensor], float, Run | None], Mapping[str, torch.Tensor]]
"""Is given this rank's own gradients, how much they count, and what synchronizes them; returns what `grad` gets."""


class _Forward:
    """A forward pass, for as long as a backward pass may begin from what it has returned."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.is_reached = False

    def __call__(self, gradient: torch.Tensor) -> None:
        """A gradient has come to one of its outputs."""
        self.is_reached = True


class EagerGradients:
    """Synchronizes the gradients of a model that is called by the user, and whose backward pass is the user's."""

    def __init__(self, model: EagerModel, begin: Begin, end: End, guard: Callable[[], Guard]) -> None:
        """`guard`: goes around the communication of one backward pass."""
        self._model = model
        self._new_guard = guard
        self._guard: Guard | None = None
        self._said = False
        self._begin = begin
        self._end = end
        self._alive: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._run: Run | None = None
        self._weight = 0.0
        self._is_open = False
        self._before: dict[str, torch.Tensor | None] = {}
        self._own: dict[str, torch.Tensor] = {}
        for name, node in model.accumulators.items():
            node.register_prehook(lambda _: self._open())
            node.register_hook(lambda *_, name=name: self._complete(name))

    def forward(self, weight: float, call: Callable[[], Any]) -> Any:
        """Calls the model; `weight`: how much the batch counts."""
        self._close()
        self._model.begin()
        output = call()
        passed = _Forward(weight)
        for tensor in output_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(passed)  # type: ignore[no-untyped-call]
        self._alive.add(passed)
        return output

    def _open(self) -> None:
        """Behind this, gradients of one backward pass come, until it ends."""
        if self._is_open or not self._alive:
            return
        Variable._execution_engine.queue_callback(self._finish)
        self._is_open = True
        reached = [f for f in self._alive if f.is_reached] or list(self._alive)
        for f in reached:
            f.is_reached = False
        self._weight = self._weight_of([f.weight for f in reached])
        for name, p in self._model.parameters.items():
            self._before[name], p.grad = p.grad, None
        self._guard = self._new_guard()
        self._guard.__enter__()
        with self._guarded():
            self._run = self._begin(self._weight)
            if self._run is not None:
                self._run.advance()

    def _complete(self, name: str) -> None:
        if not self._is_open:
            return
        if self._weight == 0 and self._run is not None:
            self._model.parameters[name].grad = None  # of a batch that counts as nothing, it may be no number
            return
        with self._guarded():
            gradient = self._model.own_gradient(name)
            if gradient is None:
                return
            self._own[name] = self._own[name] + gradient if name in self._own else gradient
            if self._run is not None:
                self._run.take(name, gradient)

    def _finish(self) -> None:
        own, run, before = self._own, self._run, self._before
        with self._guarded():
            found = self._end(own, self._weight, run)
            guard, self._guard = self._guard, None
            assert guard is not None
            guard.__exit__(None, None, None)
            self._close()
            for name, gradient in found.items():
                earlier = before[name]
                self._model.parameters[name].grad = gradient if earlier is None else earlier.add_(gradient)

    def _close(self) -> None:
        """Puts back what lay in `grad`; also of a backward pass that has failed."""
        if self._is_open:
            for name, gradient in self._before.items():
                self._model.parameters[name].grad = gradient
        if self._guard is not None:
            guard, self._guard = self._guard, None
            unfinished = RuntimeError("a backward pass has not come to its end")
            guard.__exit__(type(unfinished), unfinished, None)
        self._is_open, self._run, self._own, self._before = False, None, {}, {}

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around a part of what the pass's guard is for."""
        try:
            with torch.no_grad():
                yield
        except BaseException as e:
            guard, self._guard = self._guard, None
            if guard is not None:
                guard.__exit__(type(e), e, e.__traceback__)
            raise

    def _weight_of(self, weights: list[float]) -> float:
        """How much a backward pass counts that goes through several forward passes: as they do on average."""
        if len(set(weights)) > 1 and not self._said:
            self._said = True
            warnings.warn(
                "one backward pass goes through several forward passes, of batches that count differently "
                f"({', '.join(f'{w:g}' for w in weights[:5])}): their gradients come as one sum, which counts as their "
                "batches do on average. Call backward() for each, or pass weight=",
                AutoparWarning,
                stacklevel=2,
            )
        return sum(weights) / len(weights)
