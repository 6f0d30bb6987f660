"""A guard that runs with a training whose plan loses something, and has it go on exactly where that goes wrong.

It looks at what costs nothing more: the loss, which is the same number on every rank, and, every `LOOK_STEPS` steps,
the norm of what ranks have not sent yet, for which they exchange one number. It steps in where

- the smoothed loss has risen by a quarter of what it had fallen by until the lossy steps began, or in the first
  `SETTLED_LOSSES` where these were lossy already, and by more than one batch and another make it rise and fall;
- the loss is no number in three steps running, and was one before;
- residuals are ten times as large as in their first looks: what is kept is added faster than it is sent;
- exact steps on the same batches, in the shadow of the plan's (`shadow`), leave its loss behind by as much.

Checkpoints keep what it has seen, so that it goes on where training does.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter, ValidationError

from autopar.errors import AutoparWarning, SpecError

LOOK_STEPS = 20
SETTLING_LOOKS = 5
"""Looks at residuals that the later ones are compared with: they fill up first."""
MOST_GROWN = 10.0
MOST_RISEN = 0.25
"""A part of what the loss had fallen by when it became the measure."""
SMOOTHING = 0.98
_SMOOTHED_VARIANCE = (1 - SMOOTHING) / (1 + SMOOTHING)
"""Of a loss that is smoothed for long, in that of one loss."""
ERRORS = 6.0
"""Standard errors of two smoothed losses that a rise must exceed, besides."""
PAIRED_ERRORS = 3.0
"""Standard errors of what exact steps are ahead by that this must exceed, besides. They rest on few steps, but on the
plan's own batches. [Empirical: 4 bits, PowerSGD and averages every 4 steps are behind by less than 1 % of what the loss
has fallen by, gradients two steps late at a rate that they stagnate at by 100 to 150 %]"""
SETTLED_LOSSES = 50
"""Losses that are averaged before the average is a measure: the loss of one batch says little."""
LOST_STEPS = 3


@dataclass
class Seen:
    """What a guard has seen."""

    reason: str = ""
    losses: int = 0
    """How many there were that are numbers."""
    first: float = 0.0
    last: float = 0.0
    smoothed: float = 0.0
    variance: float = 0.0
    """Of losses about their trend: half the mean square of the difference from one to the next (von Neumann, 1941)."""
    limit: float = math.inf
    """What the smoothed loss may rise to."""
    lost: int = 0
    """Losses in a row that are no numbers."""
    norms: list[float] = field(default_factory=list)
    """Of residuals, in the first looks."""


@dataclass
class Guard:
    """Watches one program. All ranks see the same numbers, and decide alike."""

    begins: int
    """The first step that loses something."""
    residual_norm: Callable[[], float]
    """Over all ranks, by all of them together."""
    says: bool
    """Whether this rank warns."""
    seen: Seen = field(default_factory=Seen)

    @property
    def reason(self) -> str:
        """Why training has to go on exactly; empty as long as it need not."""
        return self.seen.reason

    def look(self, step: int, loss: float) -> None:
        """Behind a step, counted from 0, with its loss over all ranks."""
        seen = self.seen
        if seen.reason:
            return
        if not math.isfinite(loss):
            seen.lost += 1
            if seen.lost >= LOST_STEPS and seen.losses and step >= self.begins:
                self._end(step, f"the loss was no number in {LOST_STEPS} steps running")
            return
        seen.lost = 0
        seen.losses += 1
        if seen.losses == 1:
            seen.first = seen.last = loss
        weight = max(1 - SMOOTHING, 1 / seen.losses)
        seen.smoothed += weight * (loss - seen.smoothed)
        seen.variance += weight * ((loss - seen.last) ** 2 / 2 - seen.variance)
        seen.last = loss
        if step < self.begins:
            return
        if math.isinf(seen.limit) and seen.losses >= SETTLED_LOSSES:
            error = math.sqrt(seen.variance * (weight + _SMOOTHED_VARIANCE))
            seen.limit = seen.smoothed + MOST_RISEN * self._fell + ERRORS * error
        if seen.smoothed > seen.limit:
            self._end(step, f"the smoothed loss rose to {seen.smoothed:.5g}, above {seen.limit:.5g}")
        elif (step - self.begins) % LOOK_STEPS == LOOK_STEPS - 1:
            self._look_at_residuals(step)

    def compare(self, step: int, plans: Sequence[float], exact: Sequence[float]) -> None:
        """Behind steps that were taken exactly as well, from the same place on the same batches: with the losses of the
        plan and those of exact steps."""
        seen, half = self.seen, len(exact) // 2
        behind = [here - there for here, there in zip(plans, exact, strict=True)][half:]
        if seen.reason or not all(map(math.isfinite, behind)):
            return
        error = statistics.stdev(behind) / math.sqrt(len(behind))
        if statistics.fmean(behind) > MOST_RISEN * self._fell + PAIRED_ERRORS * error:
            there, here = statistics.fmean(exact[half:]), statistics.fmean(plans[half:])
            took = f"{len(exact)} exact steps from the same place"
            self._end(step, f"{took} brought the loss to {there:.5g}, where the plan has {here:.5g}")

    @property
    def _fell(self) -> float:
        """By how much the loss has fallen."""
        return max(self.seen.first - self.seen.smoothed, abs(self.seen.first) / 10)

    def saved(self) -> str:
        """What it has seen, for a checkpoint."""
        return json.dumps(asdict(self.seen))

    def load(self, text: str) -> None:
        """Goes on from what `saved` wrote, which `read` can read; begins anew where that is empty."""
        self.seen = self.read(text)

    @staticmethod
    def read(text: object) -> Seen:
        """What `saved` wrote. Raises `SpecError` where it did not."""
        if text == "":
            return Seen()
        try:
            return TypeAdapter(Seen).validate_json(str(text), strict=True)
        except ValidationError:
            raise SpecError(
                "the checkpoint's 'guard' is not what a program under a quality budget writes there: load what "
                "program.state_dict() returned, or leave 'guard' out, and the guard begins anew"
            ) from None

    def _look_at_residuals(self, step: int) -> None:
        norm, norms = self.residual_norm(), self.seen.norms
        if len(norms) < SETTLING_LOOKS:
            norms.append(norm)
        elif not norm <= MOST_GROWN * max(norms) and max(norms) > 0:
            self._end(step, f"what ranks have not sent yet grew to {norm:.3g}, from {max(norms):.3g}")

    def _end(self, step: int, reason: str) -> None:
        self.seen.reason = f"step {step}: {reason}"
        if self.says:
            warnings.warn(
                f"the plan loses more than it may ({self.reason}): training goes on with exact synchronization",
                AutoparWarning,
                stacklevel=5,
            )
