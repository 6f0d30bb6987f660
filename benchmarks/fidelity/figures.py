"""How good predictions are: of times, of the order within choices, and what choosing by them costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau

Floats = npt.NDArray[np.float64]
ORDERED = 3
"""So many plans have an order that can be more or less right; of two, noise often decides which is first."""
CLEAR_GAP = 0.02
"""Of two plans whose times differ by less than this fraction, noise may have decided which is faster."""


@dataclass(frozen=True)
class Choices:
    """Predicted and measured seconds of several ways to do the same thing, one of which is to be chosen."""

    predicted: Floats
    measured: Floats

    def regret(self, first: int = 1) -> float:
        """How much slower than the best the fastest of the `first` is that are predicted to be fastest; 0 for none."""
        order = np.argsort(self.predicted, kind="stable")[:first]
        return float(self.measured[order].min() / self.measured.min() - 1)

    def tau(self) -> float | None:
        """Kendall's tau-b: 1 for the right order, -1 for the reverse. `None` where there is no order."""
        if len(self.measured) < 2 or np.ptp(self.measured) == 0 or np.ptp(self.predicted) == 0:
            return None
        return float(kendalltau(self.predicted, self.measured).statistic)

    def pairs(self, gap: float = CLEAR_GAP) -> tuple[int, int]:
        """Pairs in the right order, and all, of those whose measured times differ by more than `gap`."""
        i, j = np.triu_indices(len(self.measured), 1)
        apart = np.abs(np.log(self.measured[i] / self.measured[j])) > np.log1p(gap)
        right = (self.predicted[i] < self.predicted[j]) == (self.measured[i] < self.measured[j])
        return int((right & apart).sum()), int(apart.sum())


@dataclass(frozen=True)
class Quality:
    """All figures over some predictions."""

    count: int
    mape: float
    """Mean of |predicted / measured - 1|."""
    p95: float
    """What 95 % of these stay below."""
    bias: float
    """Mean of predicted / measured - 1: above 0 where predictions are too slow."""
    tau: float | None
    """Mean of Kendall's tau within choices of `ORDERED` plans or more."""
    pairs: float | None
    """Part of the clearly different pairs within choices that are in the right order."""
    regret: float | None
    """Mean over choices, of the one predicted to be the fastest."""
    worst_regret: float | None
    regret_of_3: float | None
    """Of the best of the three predicted to be the fastest, which a planner may try out."""

    @classmethod
    def of(
        cls, predicted: Floats, measured: Floats, choices: Sequence[object], plans: Sequence[object] | None = None
    ) -> Quality:
        """`choices`: for each prediction, which choice it belongs to. `plans`: and which plan it is of, where some were
        measured more than once: they are one of the choice, with the median of its times."""
        errors = predicted / measured - 1
        sets = [s for s in grouped(predicted, measured, choices, plans).values() if len(s.measured) > 1]
        taus = [tau for tau in (s.tau() for s in sets if len(s.measured) >= ORDERED) if tau is not None]
        right, apart = (sum(p) for p in zip(*(s.pairs() for s in sets), strict=True)) if sets else (0, 0)
        regrets = [s.regret() for s in sets]
        return cls(
            len(measured),
            float(np.abs(errors).mean()),
            float(np.quantile(np.abs(errors), 0.95)),
            float(errors.mean()),
            mean(taus) if taus else None,
            right / apart if apart else None,
            mean(regrets) if regrets else None,
            max(regrets) if regrets else None,
            mean(s.regret(3) for s in sets) if sets else None,
        )


def grouped(
    predicted: Floats, measured: Floats, choices: Sequence[object], plans: Sequence[object] | None = None
) -> Mapping[object, Choices]:
    """Predictions by the choice that they belong to, one of each plan; each is of another plan where none is named."""
    places: dict[object, dict[object, list[int]]] = {}
    for i, (choice, plan) in enumerate(zip(choices, plans or range(len(choices)), strict=True)):
        places.setdefault(choice, {}).setdefault(plan, []).append(i)
    return {
        choice: Choices(
            np.array([predicted[at[0]] for at in of.values()]),
            np.array([np.median(measured[at]) for at in of.values()]),
        )
        for choice, of in places.items()
    }
