"""What a step hands back besides its loss, where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.gradient_norm import StepNorm


@dataclass(frozen=True)
class StepResult:
    """What `program.step(batch, outputs=True, grad_norm=True)` returns: the loss, and what was asked for besides."""

    loss: torch.Tensor
    """The global mean loss, detached: what `program.step(batch)` returns."""
    output: Any = None
    """The model's output for this rank's batch, detached, as its `forward` returned it before the update; of
    micro-batches, a list. A loss in it is that of this rank's batch. `None` where it was not asked for."""
    grad_norm: torch.Tensor | None = None
    """The norm over the gradients of all parameters that the step updates with, before they are clipped: a float64
    scalar, the same on all ranks. `None` where it was not asked for."""


@dataclass(frozen=True)
class Asked:
    """What a step is asked for."""

    outputs: bool
    grad_norm: bool
    accumulates: bool
    """Whether its batches were given as micro-batches."""

    def together(self, own_order: bool, norm: StepNorm | None) -> str:
        """What of it all ranks must ask for, as the arguments of a call. `own_order`: whether collectives have another
        order where outputs are returned."""
        asked = {"outputs=True": self.outputs and own_order, "grad_norm=True": norm is not None and norm.is_shared}
        return ", ".join(k for k, is_so in asked.items() if is_so)

    def result(self, loss: torch.Tensor, outputs: list[Any], norm: StepNorm | None) -> torch.Tensor | StepResult:
        """What the step returns; `outputs`: of each of its batches."""
        if not self.outputs and norm is None:
            return loss
        found = (outputs if self.accumulates else outputs[0]) if self.outputs else None
        return StepResult(loss, found, None if norm is None else norm.total())
