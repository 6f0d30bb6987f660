"""What the cost model is compared with: models that others use, learned from the same trials.

Each takes what is known of some trials, and returns what predicts others. Those that only rank return scores that
stand for times: lower is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.fidelity.figures import Floats

SIMULATED = "log step"
"""The feature that is the simulation's own outcome."""
LEAST_GAP = 0.02
"""Pairs that differ by less, in logarithms, teach nothing about their order."""

Predict = Callable[[Floats], Floats]
Method = Callable[[Sequence[str], Floats, Floats, Sequence[object]], Predict]
"""From names of features, rows of them, measured times and the choices that rows belong to."""


def raw_boosting(names: Sequence[str], rows: Floats, truth: Floats, choices: Sequence[object]) -> Predict:
    """Boosted trees from features of the plan to its time, without the simulation's."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    kept = [i for i, name in enumerate(names) if name != SIMULATED]
    model = HistGradientBoostingRegressor(max_iter=200, learning_rate=0.06, random_state=0)
    model.fit(rows[:, kept], np.log(truth))
    return lambda others: np.exp(model.predict(others[:, kept]))


def linear_ranker(names: Sequence[str], rows: Floats, truth: Floats, choices: Sequence[object]) -> Predict:
    """AutoSync's learned model in its simplest form (Zhang et al., NeurIPS 2020): a linear score, learned from which of
    two plans of one choice was faster; without the simulation."""
    return _ranker([i for i, name in enumerate(names) if name != SIMULATED], rows, truth, choices)


def ranker_on_simulation(names: Sequence[str], rows: Floats, truth: Floats, choices: Sequence[object]) -> Predict:
    """The same objective over the simulation's outcome and all features."""
    return _ranker(list(range(len(names))), rows, truth, choices)


def _ranker(kept: list[int], rows: Floats, truth: Floats, choices: Sequence[object]) -> Predict:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler: Any = StandardScaler().fit(rows[:, kept])
    scaled = scaler.transform(rows[:, kept])
    places: dict[object, list[int]] = {}
    for i, choice in enumerate(choices):
        places.setdefault(choice, []).append(i)
    differences, slower = [], []
    for at in places.values():
        for a in at:
            for b in at:
                if a != b and abs(np.log(truth[a] / truth[b])) > LEAST_GAP:
                    differences.append(scaled[a] - scaled[b])
                    slower.append(truth[a] > truth[b])
    if not differences:
        return lambda others: np.ones(len(others))
    model: Any = LogisticRegression(fit_intercept=False, max_iter=1000).fit(np.array(differences), slower)
    return lambda others: np.exp(np.clip(scaler.transform(others[:, kept]) @ model.coef_[0], -50, 50))


METHODS: dict[str, tuple[Method, bool]] = {
    "boosted trees, no simulation": (raw_boosting, True),
    "linear ranker, no simulation (AutoSync)": (linear_ranker, False),
    "linear ranker on the simulation": (ranker_on_simulation, False),
}
"""With whether they predict times, or only an order."""
