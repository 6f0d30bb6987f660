"""What a user allows lossy synchronization to cost, and how it is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import SpecError

Metric = Callable[[nn.Module], float]
"""The metric of a model, which is in evaluation mode. Each rank may look at its part of the data: the mean counts."""
LEAST_STEPS = 500
"""The fewest steps of a training that a budget chooses a plan for: with fewer, a tenth of them is too short to tell
plans apart."""


@dataclass(frozen=True)
class QualityBudget:
    """Lossy synchronization is allowed as far as the metric loses no more than this, for `optimize(..., budget=)`.

    At the same number of steps and the same schedule, the metric loses at most `loss` of what exact training gains.
    """

    loss: float
    """The part of the metric's gain over training that may be lost: 0.01 for one per cent."""
    metric: Metric
    batches: Iterable[Any]
    """Batches of this rank, as it will train on them; they are gone through again where there are too few."""
    steps: int
    """Steps that the training will have. Trying plans on copies of the model takes at most a tenth as many."""
    higher_is_better: bool = True
    """Whether a larger metric is a better one: an accuracy, not a loss."""

    def __post_init__(self) -> None:
        """Raises `SpecError` where no plan can be chosen by the budget."""
        if not 0 < self.loss < 1:
            raise SpecError(
                f"the quality budget is {self.loss}, expected a part of what training gains: 0.01 for one per cent"
            )
        if self.steps < LEAST_STEPS:
            raise SpecError(
                f"steps is {self.steps}: with fewer than {LEAST_STEPS} steps, a tenth of them is too short to tell "
                "lossy methods apart; name a strategy, or take fidelity='rounded'"
            )

    def taken(self, count: int) -> list[Any]:
        """The first `count` batches. Raises `SpecError` where there is none."""
        found = list(itertools.islice(self.batches, count))
        if not found:
            raise SpecError("the quality budget's batches are empty: plans are tried on batches of the training")
        return list(itertools.islice(itertools.cycle(found), count))
