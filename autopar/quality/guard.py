"""A guard that runs with a training whose plan loses something, and has it go on exactly where that goes wrong.

It looks at what costs nothing more: the loss, which is the same number on every rank, and, every `LOOK_STEPS` steps,
the norm of what ranks have not sent yet, for which they exchange one number. It steps in where

- the smoothed loss has risen by a quarter of what it had fallen by until the lossy steps began, or in the first
  `SETTLED_LOSSES` where these were lossy already;
- the loss is no number in three steps running, and was one before;
- residuals are ten times as large as in their first looks: what is kept is added faster than it is sent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.errors import AutoparWarning

LOOK_STEPS = 20
SETTLING_LOOKS = 5
"""Looks at residuals that the later ones are compared with: they fill up first."""
MOST_GROWN = 10.0
MOST_RISEN = 0.25
"""A part of what the loss had fallen by when it became the measure."""
SMOOTHING = 0.98
SETTLED_LOSSES = 50
"""Losses that are averaged before the average is a measure: the loss of one batch says little."""
LOST_STEPS = 3


@dataclass
class Guard:
    """Watches one program. All ranks see the same numbers, and decide alike."""

    begins: int
    """The first step that loses something."""
    residual_norm: Callable[[], float]
    """Over all ranks, by all of them together."""
    says: bool
    """Whether this rank warns."""
    reason: str = ""
    """Why training has to go on exactly; empty as long as it need not."""
    _losses: int = 0
    """How many it has seen that are numbers."""
    _first: float = 0.0
    _smoothed: float = 0.0
    _limit: float = math.inf
    _lost: int = 0
    _norms: list[float] = field(default_factory=list)

    def look(self, step: int, loss: float) -> None:
        """Behind a step, counted from 0, with its loss over all ranks."""
        if self.reason:
            return
        if not math.isfinite(loss):
            self._lost += 1
            if self._lost >= LOST_STEPS and self._losses and step >= self.begins:
                self._end(step, f"the loss was no number in {LOST_STEPS} steps running")
            return
        self._lost = 0
        self._losses += 1
        self._first = loss if self._losses == 1 else self._first
        self._smoothed += max(1 - SMOOTHING, 1 / self._losses) * (loss - self._smoothed)
        if step < self.begins:
            return
        if math.isinf(self._limit) and self._losses >= SETTLED_LOSSES:
            self._limit = self._smoothed + MOST_RISEN * max(self._first - self._smoothed, abs(self._first) / 10)
        if self._smoothed > self._limit:
            self._end(step, f"the smoothed loss rose to {self._smoothed:.5g}, above {self._limit:.5g}")
        elif (step - self.begins) % LOOK_STEPS == LOOK_STEPS - 1:
            self._look_at_residuals(step)

    def _look_at_residuals(self, step: int) -> None:
        norm = self.residual_norm()
        if len(self._norms) < SETTLING_LOOKS:
            self._norms.append(norm)
        elif not norm <= MOST_GROWN * max(self._norms) and max(self._norms) > 0:
            self._end(step, f"what ranks have not sent yet grew to {norm:.3g}, from {max(self._norms):.3g}")

    def _end(self, step: int, reason: str) -> None:
        self.reason = f"step {step}: {reason}"
        if self.says:
            warnings.warn(
                f"the plan loses more than it may ({self.reason}): training goes on with exact synchronization",
                AutoparWarning,
                stacklevel=5,
            )
