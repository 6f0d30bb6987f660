"""What a probe and a pilot say together of a plan under a budget: the same for who runs them, and who reads of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.quality.degradation import Loss
from autopar.spec.quality import Considered, QualityChoice

TOO_MUCH = "expected to lose more than the budget"
REFUTED = "lost too much"
SHOWN = "chosen"
SLOWER = "slower"
NOT_SHOWN = "not shown to keep to the budget"
NOT_TRIED = "not tried further"


@dataclass(frozen=True)
class Shown:
    """What is known of one plan."""

    loss: Loss
    """By the map, after its probe."""
    lost: float = math.inf
    """What its pilot lost of what the exact pilot gained; infinite where that is no number, or without a pilot."""
    chance: float = math.inf
    """What two exact pilots differ by; infinite where they gained nothing, or there were none."""
    late: float = 0.0
    """Of what the pilot lost, what a training catches up with."""
    apart: float = 1.0
    """How far the plan's probe ended from the exact one, in what other batches make of that. Trainings on the same
    batches that lie closer together differ by less by chance, to first order in proportion."""
    is_number: bool = True
    """Whether the metric was one behind the pilot."""

    @classmethod
    def of(cls, one: Considered, choice: QualityChoice) -> Shown:
        """From what a plan keeps."""
        loss = Loss(_or(one.expected, 1.0), _or(one.bound, 1.0))
        if one.late is None:
            return cls(loss)
        lost, chance = _or(one.lost, math.inf), _or(choice.chance, math.inf)
        return cls(loss, lost, chance, one.late, _or(one.apart, 1.0), one.metric is not None)

    def verdict(self, budget: float) -> str:
        """The first three above, or `NOT_SHOWN`. `budget`: what may be lost, as a part of what exact training gains."""
        if self.loss.expected > budget:
            return TOO_MUCH
        if not (self.is_number and self.lost <= budget + self.chance + self.late):
            return REFUTED
        # A pilot that ends far from the exact one, on either side, says little of a training that is ten times as long.
        ended_alike = abs(self.lost) + min(1.0, self.apart) * self.chance <= budget
        is_shown = self.loss.bound <= budget or ended_alike
        return SHOWN if is_shown else NOT_SHOWN


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
