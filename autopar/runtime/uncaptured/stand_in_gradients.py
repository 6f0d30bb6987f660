"""Backward passes of a captured drop-in module through batches that could not be captured: the user's own.

The gradients that they leave on this rank are synchronized as they end, by what the captured passes of other ranks
issue, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from autopar.errors import CaptureError
from autopar.runtime.compiled import Compiled
from autopar.runtime.drop_in.kept_gradients import Kept, KeptGradients
from autopar.runtime.uncaptured.gradients import EagerGradients
from autopar.runtime.uncaptured.steps import EagerStep, Run


class Synchronize(Protocol):
    """Sums gradients over the ranks."""

    def __call__(self, own: Mapping[str, torch.Tensor], weight: float, kept: Kept) -> dict[str, torch.Tensor]:
        """`own`: this rank's own, by name, of a batch that counts by `weight`. `kept`: those of earlier passes.
        Returns those that some rank has a gradient of."""


class StandInGradients:
    """What a drop-in module's batches have in common that could not be captured."""

    def __init__(
        self,
        c: Compiled,
        kept: KeptGradients | None,
        sends: Callable[[bool], bool],
        synchronize: Synchronize,
        guard: Callable[[], AbstractContextManager[None]],
        arrived: Callable[[Collection[str]], None],
    ) -> None:
        """`kept`: the module's; `None` where what lies in `grad` is nobody's but autograd's. `sends`: whether a
        backward pass is not kept to this rank, given whether its forward pass was to be sent. `guard`: as of
        `EagerGradients`. `arrived`: is told the parameters all of whose gradients of a backward pass are synchronized
        here."""
        assert c.eager is not None
        self._kept = kept
        self._sends = sends
        self._synchronize = synchronize
        self._taken: Kept | None = None
        self._arrived = arrived
        self._parameters = c.eager.parameters
        self._captured_task = -1
        """The last backward pass that went through a captured batch."""
        self._captured: dict[str, torch.Tensor] = {}
        """Gradients of the captured batches that it went through, synchronized."""
        self._keeps = False
        """Whether it keeps gradients back."""
        self._gradients = EagerGradients(c.eager, self._begin, self._end, guard, beside_others=True)

    def forward(self, weight: float, synchronizes: bool, call: Callable[[], Any]) -> Any:
        """Calls the model; as `EagerGradients.forward`."""
        return self._gradients.forward(weight, synchronizes, call)

    def call_captured(self) -> None:
        """Before a forward pass of a captured batch."""
        self._gradients.forget_reached()

    def pass_captured(self, keeps: bool) -> None:
        """Notes that the backward pass under way goes through a captured batch. `keeps`: whether that one's gradients
        are kept back. Raises `CaptureError` where it goes through another one, too, and they cannot be told apart."""
        task = torch._C._current_graph_task_id()
        if task != self._captured_task:
            self._captured_task, self._captured, self._keeps = task, {}, False
        self._keeps |= keeps
        if self._gradients.is_under_way:
            self._check_apart(self._taken is None)

    def deliver_captured(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Is given what the captured batch has left, synchronized, to be taken off what arrives at parameters."""
        if not self._gradients.may_come:
            return
        for name, gradient in gradients.items():
            if gradient is not None:
                self._captured[name] = self._captured[name] + gradient if name in self._captured else gradient

    def _check_apart(self, keeps: bool) -> None:
        """Raises `CaptureError` where gradients of the two kinds of batches come as one sum that cannot be parted."""
        hooked = next((n for n, p in self._parameters.items() if p._backward_hooks), None)
        if not keeps and not self._keeps and hooked is None:
            return
        why = "within no_sync()" if hooked is None else f"and parameter '{hooked}' has a hook on the sum of both"
        raise CaptureError(
            f"one backward pass goes through a batch that was captured and through one that could not be, {why}: call "
            "backward() for each, or pass capture='never' to autopar.optimize"
        )

    def _begin(self, weight: float, synchronizes: bool) -> None:
        keeps = not self._sends(synchronizes)
        if self._captured_task == torch._C._current_graph_task_id():
            self._check_apart(keeps)
        self._taken = None if keeps else Kept() if self._kept is None else self._kept.take(weight, self._parameters)

    def _end(self, own: Mapping[str, torch.Tensor], weight: float, run: Run | None) -> dict[str, torch.Tensor]:
        captured = {}
        if self._captured_task == torch._C._current_graph_task_id():
            captured = {n: g for n, g in self._captured.items() if n in own}
        self._captured = {}
        counted = {n: g - captured[n] if n in captured else g for n, g in own.items()}
        taken, self._taken = self._taken, None
        if taken is None:
            assert self._kept is not None, "only what has a place for them keeps gradients back"
            self._kept.add(counted, weight)
            return {}
        self._arrived(own)
        found = self._synchronize(counted, weight, taken)
        return found | {n: found[n] + g if n in found else g for n, g in captured.items()}


def run_backward(
    step: EagerStep,
    tangent: torch.Tensor,
    own: Mapping[str, torch.Tensor],
    weight: float,
    scalars: Sequence[torch.Tensor],
    earlier: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Runs what stands in for a backward graph, on gradients that are complete, of a batch that counts by `weight`.
    `scalars`, `earlier`: what the graph takes behind its tangent."""
    run = Run(step, [None, tangent, *scalars, *earlier])
    run.advance()
    for name, gradient in ({} if run.is_left_out(weight) else own).items():
        run.take(name, gradient)
    run.end()
    return list(run.result())
