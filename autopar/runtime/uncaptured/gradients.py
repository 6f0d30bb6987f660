"""A drop-in module that runs its model eagerly: gradients are synchronized beside the user's own backward pass.

Hooks on the parameters' gradient accumulators, as DDP has them, run what was written into the model's outline: the
first gradient of a backward pass begins it, and the pass's end completes it. What lay in `grad` before stays there, and
the synchronized gradient is added to it; then hooks run that wait for gradients to be accumulated.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from autopar.errors import AutoparWarning, CaptureError
from autopar.ir.held_tensors import held_tensors
from autopar.runtime.model.gradient_layout import laid_out
from autopar.runtime.uncaptured.steps import Run

if TYPE_CHECKING:
    from autopar.runtime.uncaptured.model import EagerModel

Guard = contextlib.AbstractContextManager[None]
Begin = Callable[[float, bool], Run | None]
"""Begins to synchronize a backward pass; returns `None` where its gradients are to be kept on this rank. First, how
much its batch counts; second, whether a forward pass that it goes through was to be synchronized."""
End = Callable[[Mapping[str, torch.Tensor], float, Run | None], Mapping[str, torch.Tensor]]
"""Is given this rank's own gradients, how much they count, and what synchronizes them; returns what `grad` gets
besides what it did itself."""


def _is_within_another() -> bool:
    """Whether the backward pass under way was begun within another one, on the same thread."""
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None and count < 2:
        count += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back
    return count == 2


class _Forward:
    """A forward pass, for as long as a backward pass may begin from what it has returned."""

    def __init__(self, weight: float, synchronizes: bool) -> None:
        self.weight = weight
        self.synchronizes = synchronizes
        self.is_reached = False
        self.is_hooked = False
        """Whether it has an output that tells it when a gradient comes."""

    def __call__(self, gradient: torch.Tensor) -> None:
        """A gradient has come to one of its outputs."""
        self.is_reached = True


class EagerGradients:
    """Synchronizes the gradients of a model that is called by the user, and whose backward pass is the user's."""

    def __init__(
        self,
        model: EagerModel,
        begin: Begin,
        end: End,
        guard: Callable[[], Guard],
        beside_others: bool = False,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`guard`: goes around the communication of one backward pass. `beside_others`: whether gradients also come
        from passes that are not this object's. `ended`: called when synchronized gradients lie in `grad`."""
        self._ended = ended
        self._model = model
        self._beside_others = beside_others
        self._new_guard = guard
        self._guard: Guard | None = None
        self._said = False
        self._begin = begin
        self._end = end
        self._alive: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._fresh: list[_Forward] = []
        """Behind which no backward pass has ended. What is alive is up to each rank; this is the same on all."""
        self._task = -1
        self._hooks: list[tuple[str, Any, dict[int, Any]]] = []
        """That wait for gradients to be accumulated, by their parameter, with the table that they lie in."""
        self._said_hooks = False
        self._said_around = False
        self._around = -1
        """The backward pass within which the module was last called, as by a checkpoint that begins one of its own."""
        self._came = -1
        """The last backward pass in which a gradient came to an output of the module, since that was last called."""
        self._run: Run | None = None
        self._weight = 0.0
        self._is_left_out = False
        """Whether this rank's gradients, of a batch that counts as nothing, are zeros to all ranks."""
        self._is_open = False
        self._before: dict[str, torch.Tensor | None] = {}
        self._own: dict[str, torch.Tensor] = {}
        for name, node in model.accumulators.items():
            node.register_prehook(lambda _, name=name: self._begins(name))
            node.register_hook(lambda *_, name=name: self._complete(name))

    def forward(self, weight: float, synchronizes: bool, call: Callable[[], Any]) -> Any:
        """Calls the model; `weight`: how much the batch counts. `synchronizes`: whether gradients are to be sent."""
        if self._is_open and self._task == torch._C._current_graph_task_id():
            return call()  # within a backward pass, for a checkpoint that lies around the module
        self.forget_reached()
        self._around = torch._C._current_graph_task_id()
        self._close()
        self._came = -1
        self._model.begin(goes_on=bool(self._fresh))
        output = call()
        passed = _Forward(weight, synchronizes)
        for tensor in held_tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:  # a parameter would keep the hook
                tensor.register_hook(passed)  # type: ignore[no-untyped-call]
                tensor.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]
                passed.is_hooked = True
        self._alive.add(passed)
        self._fresh.append(passed)
        return output

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        self._came = torch._C._current_graph_task_id()

    def forget_reached(self) -> None:
        """Before a forward pass: backward passes that have ended may have come to no parameter that is trained."""
        if torch._C._current_graph_task_id() == -1:
            for f in self._alive:
                f.is_reached = False

    @property
    def is_under_way(self) -> bool:
        """Whether the backward pass that runs now is one of these, and has come to a parameter."""
        return self._is_open and self._task == torch._C._current_graph_task_id()

    @property
    def may_come(self) -> bool:
        """Whether a backward pass may go through one of these forward passes."""
        return len(self._alive) > 0

    def _open(self) -> None:
        """Behind this, gradients of one backward pass come, until it ends."""
        fresh = [f for f in self._fresh if not (self._beside_others and f.is_hooked)]
        reached = [f for f in self._alive if f.is_reached] or fresh
        if not reached:  # it goes through no output of the module, as the gradient of a penalty on parameters
            return
        apart = self._came in (-1, torch._C._current_graph_task_id()) and self._around == -1
        self._model.is_apart = apart and any(f.is_hooked for f in reached) and _is_within_another()
        if torch.is_grad_enabled():
            raise CaptureError(
                "backward(create_graph=True) cannot be synchronized, as nothing flows back through what others have "
                "sent: take gradients that are differentiated again with torch.autograd.grad"
            )
        Variable._execution_engine.queue_callback(self._finish)
        self._is_open = True
        self._task = torch._C._current_graph_task_id()
        for f in reached:
            f.is_reached = False
        self._weight = self._weight_of([f.weight for f in reached])
        self._put_hooks_off()
        self._guard = self._new_guard()
        self._guard.__enter__()
        with self._guarded():
            self._run = self._begin(self._weight, any(f.synchronizes for f in reached))
            if self._run is not None:
                self._run.advance()
            self._is_left_out = self._run is not None and self._run.is_left_out(self._weight)

    def _begins(self, name: str) -> None:
        """A gradient is about to be added to `grad`."""
        if not self._is_open:
            self._open()
        if self._is_open:
            p = self._model.parameters[name]
            self._before[name], p.grad = p.grad, None
        elif self._around == torch._C._current_graph_task_id() and not self._said_around:
            self._said_around = True
            warnings.warn(
                f"parameter '{name}' gets a gradient from elsewhere after the module's, in a backward pass around that "
                "of a checkpoint which calls the module: it stays this rank's own. Pass use_reentrant=False to the "
                "checkpoint",
                AutoparWarning,
                stacklevel=2,
            )

    def _complete(self, name: str) -> None:
        if name not in self._before:
            return
        with self._guarded():
            gradient = None
            if not self._is_left_out:
                gradient = self._model.own_gradient(name)
            self._model.parameters[name].grad = self._before.pop(name)
            if gradient is None:
                return
            self._own[name] = self._own[name] + gradient if name in self._own else gradient
            if self._run is not None:
                self._run.take(name, gradient)

    def _finish(self) -> None:
        own, run = self._own, self._run
        with self._guarded():
            found = self._end(own, self._weight, run)
            guard, self._guard = self._guard, None
            assert guard is not None
            guard.__exit__(None, None, None)
            hooks = self._hooks
            self._close()
            self._fresh = [f for f in self._fresh if not f.is_hooked][1:]
            for name, gradient in found.items():
                p = self._model.parameters[name]
                p.grad = laid_out(gradient, p) if p.grad is None else p.grad.add_(gradient)
            if run is not None:
                self._ended()
            for name, _, of_parameter in hooks:
                if name in found:
                    for hook in of_parameter.values():
                        hook(self._model.parameters[name])

    def _put_hooks_off(self) -> None:
        """Has hooks that wait for gradients to be accumulated run when these are synchronized: they may update."""
        for name, p in self._model.parameters.items():
            if p._post_accumulate_grad_hooks:
                self._hooks.append((name, p._post_accumulate_grad_hooks, dict(p._post_accumulate_grad_hooks)))
                p._post_accumulate_grad_hooks.clear()
            if p._backward_hooks and not self._said_hooks:
                self._said_hooks = True
                warnings.warn(
                    f"parameter '{name}' has a hook on its gradient, which is given this rank's own, before it is "
                    "synchronized, as with DistributedDataParallel. What is to see the synchronized gradient registers "
                    "with register_post_accumulate_grad_hook",
                    AutoparWarning,
                    stacklevel=2,
                )

    def _close(self) -> None:
        """Puts back what was put aside; also of a backward pass that has failed."""
        for name, earlier in self._before.items():
            self._model.parameters[name].grad = earlier
        for _, table, kept in self._hooks:
            table.update(kept)
        if self._guard is not None:
            guard, self._guard = self._guard, None
            unfinished = RuntimeError("a backward pass has not come to its end")
            guard.__exit__(type(unfinished), unfinished, None)
        self._is_open, self._run, self._own, self._before, self._hooks = False, None, {}, {}, []

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
