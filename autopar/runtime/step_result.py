"""What a step hands back besides its loss, where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepResult:
    """What `program.step(batch, outputs=True, grad_norm=True)` returns."""

    loss: torch.Tensor
    """The global mean loss, detached: what `program.step(batch)` returns."""
    output: Any = None
    """The model's output for this rank's batch, detached, as its `forward` returned it before the update; of
    micro-batches, a list. A loss in it is that of this rank's batch. `None` where it was not asked for."""
    grad_norm: torch.Tensor | None = None
    """The norm over the gradients of all parameters that the step updates with, before they are clipped: a float64
    scalar, the same on all ranks. `None` where it was not asked for."""
