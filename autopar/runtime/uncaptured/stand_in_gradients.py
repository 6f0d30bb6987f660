"""Backward passes of a captured drop-in module through batches that could not be captured: the user's own.

The gradients that they leave on this rank are synchronized as they end, by what the captured passes of other ranks
issue, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from autopar.errors import CaptureError
from autopar.runtime.compiled import Compiled
from autopar.runtime.drop_in.kept_gradients import Kept, KeptGradients
from autopar.runtime.uncaptured.gradients import EagerGradients
from autopar.runtime.uncaptured.steps import EagerStep, Run

_SEPARATELY = (
    "one backward pass goes through a batch that was captured and through one that could not be: call backward() for "
    "each, or pass capture='never' to autopar.optimize"
)


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
        kept: KeptGradients,
        may_keep: Callable[[bool], bool],
        synchronize: Synchronize,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`kept`: the module's. `may_keep`: whether a backward pass is kept to this rank, given whether its forward
        pass was to be sent. `guard`: as of `EagerGradients`."""
        assert c.eager is not None
        self._kept = kept
        self._may_keep = may_keep
        self._synchronize = synchronize
        self._taken: Kept | None = None
        self._captured_task = -1
        self._gradients = EagerGradients(c.eager, self._begin, self._end, guard, beside_others=True)

    def forward(self, weight: float, synchronizes: bool, call: Callable[[], Any]) -> Any:
        """Calls the model; as `EagerGradients.forward`."""
        return self._gradients.forward(weight, synchronizes, call)

    def call_captured(self) -> None:
        """Before a forward pass of a captured batch."""
        self._gradients.forget_reached()

    def pass_captured(self) -> None:
        """Notes that the backward pass under way goes through a captured batch. Raises `CaptureError` where it goes
        through another one, too."""
        if self._gradients.is_under_way:
            raise CaptureError(_SEPARATELY)
        self._captured_task = torch._C._current_graph_task_id()

    def _begin(self, weight: float, synchronizes: bool) -> None:
        if self._captured_task == torch._C._current_graph_task_id():
            raise CaptureError(_SEPARATELY)
        self._taken = None if self._may_keep(synchronizes) else self._kept.take(weight)

    def _end(self, own: Mapping[str, torch.Tensor], weight: float, run: Run | None) -> dict[str, torch.Tensor]:
        counted = own if weight else {}  # what counts as nothing may be no number
        taken, self._taken = self._taken, None
        if taken is None:
            self._kept.add(counted, weight)
            return {}
        return self._synchronize(counted, weight, taken)


def run_backward(
    step: EagerStep,
    tangent: torch.Tensor,
    own: Mapping[str, torch.Tensor],
    scalars: Sequence[torch.Tensor],
    earlier: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Runs what stands in for a backward graph, on gradients that are complete. `scalars`, `earlier`: what the graph
    takes behind its tangent."""
    run = Run(step, [None, tangent, *scalars, *earlier])
    run.advance()
    for name, gradient in own.items():
        run.take(name, gradient)
    run.end()
    return list(run.result())
