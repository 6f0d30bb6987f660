"""What the rounds so far say of each plan's step time: all that was measured, and how sure that is.

Plans that ran in one round are compared block by block, so that what slowed the machine down in a block says nothing of
them; plans that ran in different rounds by way of those that ran in both. Of many plans that are measured once, the
fastest was also the luckiest: whether to measure the best ones again is decided by what is known here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

BLOCK = 0.02
"""Standard deviation of a block's median step beside what slows all plans of its round down, in logarithms, before
rounds show it. [Assumed; it counts as much as BLOCK_WEIGHT values]"""
BLOCK_WEIGHT = 4
LOADED = 0.015
"""Standard deviation, in logarithms, of what a plan's steps take in one round and not in another: where its memory
lies, which cores its ranks have. [Empirical: trials of the lab that were run again, 439 of them, differ by 0.012 where
nothing was disturbed and by 0.018 in all, as the median of their differences says]"""
DRIFT = 1.0
"""Standard deviation, in logarithms, of what steps take as the machine is faster or slower in one block than in
another. Wide, so that it counts only where no plan ran in both. [Assumed]"""
BLOCKS = 4
"""Of a round, where none was run yet."""


@dataclass(frozen=True)
class Lead:
    """What is known of how long one plan takes in the time of another; in logarithms."""

    mean: float
    deviation: float
    after_one_more: float
    """By how much the mean is expected to move (a standard deviation) as both are measured once more."""

    @property
    def shown(self) -> float:
        """The mean and one standard deviation, for the fastest of many measured plans was lucky, too: the plan is shown
        to be faster than the other where this is negative."""
        return self.mean + self.deviation


@dataclass
class Standings:
    """Least squares in logarithms: a block's step is its plan's time, by what slows the block down, by what the plan
    takes more in this round, by noise."""

    _rounds: list[dict[Hashable, tuple[float, ...]]] = field(default_factory=list)
    _plans: list[Hashable] = field(default_factory=list)
    _means: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _covariance: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def add(self, blocks_s: Mapping[Hashable, Sequence[float]]) -> None:
        """Takes a round: of each plan, the seconds that a step took in each block."""
        self._rounds.append({plan: tuple(map(math.log, of)) for plan, of in blocks_s.items()})
        self._plans = list(dict.fromkeys(plan for of in self._rounds for plan in of))
        self._solve()

    def __contains__(self, plan: Hashable) -> bool:
        return plan in self._plans

    def __bool__(self) -> bool:
        return bool(self._plans)

    def seconds(self, plan: Hashable) -> float:
        """Of a step, if the machine were as fast as it was in the first round."""
        return math.exp(self._means[self._plans.index(plan)])

    def deviation(self, plan: Hashable) -> float:
        """The standard deviation of these seconds, in logarithms."""
        i = self._plans.index(plan)
        return math.sqrt(self._covariance[i, i])

    def lead(self, plan: Hashable, over: Hashable) -> Lead:
        """`plan`'s time in `over`'s."""
        i, j = self._plans.index(plan), self._plans.index(over)
        variance = self._covariance[i, i] + self._covariance[j, j] - 2 * self._covariance[i, j]
        variance = max(float(variance), 0.0)
        mean = float(self._means[i] - self._means[j])
        return Lead(mean, math.sqrt(variance), self.after_one_more(math.sqrt(variance)))

    def beside(self, expected: Mapping[Hashable, float], covariance: np.ndarray) -> Standings:
        """Standings of some of the plans, by their rounds and by earlier predictions of them. Where two plans were
        predicted alike, most of what rounds show between them is chance, and little of it is left here. `expected`: the
        logarithm of each plan's predicted seconds; `covariance`: of the errors of these predictions.

        The conditional mean and covariance of a normal distribution (Rasmussen and Williams, Gaussian Processes for
        Machine Learning, 2006, equations 2.23 and 2.24), whose noise is what the rounds leave open.
        """
        places = [self._plans.index(plan) for plan in expected]
        before = np.fromiter(expected.values(), dtype=float)
        gain = covariance @ np.linalg.inv(covariance + self._covariance[np.ix_(places, places)])
        means = before + gain @ (self._means[places] - before)
        return Standings(self._rounds, list(expected), means, covariance - gain @ covariance)

    def after_one_more(self, deviation: float) -> float:
        """By how much what is known to `deviation` of two plans is expected to move as both are measured in a round."""
        fresh = 2 * (LOADED**2 + self.block_deviation**2 / BLOCKS)
        return deviation**2 / math.sqrt(deviation**2 + fresh)

    @property
    def block_deviation(self) -> float:
        """The standard deviation of a block beside its round's, as far as rounds show it; in logarithms."""
        squares, freedom = BLOCK_WEIGHT * BLOCK**2, BLOCK_WEIGHT
        for of in self._rounds:
            lasting = [values for values in of.values() if len(values) > 1]  # others were soon known to be slow
            count = min(map(len, lasting), default=0)
            if len(lasting) < 2:
                continue
            rows = np.array([values[:count] for values in lasting])
            rest = rows - rows.mean(0) - rows.mean(1, keepdims=True) + rows.mean()
            squares += float((rest**2).sum())
            freedom += (len(rows) - 1) * (count - 1)
        return math.sqrt(squares / freedom)

    def _solve(self) -> None:
        """The mean and the covariance of the plans' times, by the normal equations of what was seen and assumed."""
        columns: dict[Hashable, int] = {plan: i for i, plan in enumerate(self._plans)}

        def column(*of: Hashable) -> int:
            return columns.setdefault(of, len(columns))

        seen = [
            (columns[plan], column("block", k, b), column("loaded", k, plan), y)
            for k, of in enumerate(self._rounds)
            for plan, values in of.items()
            for b, y in enumerate(values)
        ]
        design, values = np.zeros((len(seen), len(columns))), np.array([y for *_, y in seen])
        for row, (plan, block, loaded, _) in enumerate(seen):
            design[row, [plan, block, loaded]] = 1.0
        information = design.T @ design / self.block_deviation**2
        for name, i in columns.items():
            if i >= len(self._plans):
                information[i, i] += (DRIFT if name[0] == "block" else LOADED) ** -2  # type: ignore[index]
        first = [columns["block", 0, b] for b in range(max(map(len, self._rounds[0].values())))]
        information[np.ix_(first, first)] += 1e8  # the first round's blocks are the machine's own speed in the mean
        inverse = np.linalg.inv(information)
        count = len(self._plans)
        self._means = (inverse @ (design.T @ values / self.block_deviation**2))[:count]
        self._covariance = inverse[:count, :count]
