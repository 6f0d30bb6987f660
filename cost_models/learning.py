"""Learns a correction of predicted times from measured ones.

How much of the residual is believed is decided on choices that were left out, and so is the interval: what carries over
to another model or cluster, not what fits those at hand.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.cost_models.correction import CLIP, Correction, Floats, Member, Tree, stacked

COVERAGE = 0.9
"""Part of the measurements that shall lie within the interval."""
MEMBERS, FOLDS = 5, 5
BELIEFS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Fractions of the learned residual that may be applied, from which one is chosen."""
LEAST_SAMPLES = 20
_TREES, _DEPTH, _RATE, _SHARE, _LEAF = 80, 3, 0.08, 0.7, 4


def learn(
    names: Sequence[str], rows: Floats, predicted: Floats, measured: Floats, choices: Sequence[Hashable], seed: int = 0
) -> Correction:
    """Learns from measured times. `rows`: a row of features for each; `choices`: what each is one of, as a model on a
    cluster: whole choices are left out to see how well the residual carries over. Raises `ValueError` for fewer than
    `LEAST_SAMPLES`."""
    if len(rows) < LEAST_SAMPLES:
        raise ValueError(f"a correction needs {LEAST_SAMPLES} measured times, got {len(rows)}")
    target = np.log(measured / predicted)
    numbers = _numbered(choices)
    left_out = _left_out(rows, target, numbers, seed)
    belief = min(BELIEFS, key=lambda b: float(np.abs(target - np.clip(b * left_out, -CLIP, CLIP)).mean()))
    members = _members(rows, target, numbers, seed)
    each = stacked(members, rows)
    errors = np.abs(target - np.clip(belief * left_out, -CLIP, CLIP))
    return Correction(
        features=tuple(names),
        members=tuple(members),
        lowest=tuple(map(float, rows.min(0))),
        highest=tuple(map(float, rows.max(0))),
        center=tuple(map(float, rows.mean(0))),
        spread=tuple(map(float, np.where(np.ptp(rows, axis=0) > 0, rows.std(0), 1.0))),
        disagreement=float(np.median(each.std(0))),
        belief=belief,
        inside=float(np.quantile(errors, COVERAGE)),
        outside=float(max(np.quantile(np.abs(target), COVERAGE), np.quantile(errors, COVERAGE))),
        samples=len(rows),
    )


def _numbered(choices: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(c, len(known)) for c in choices])


def _left_out(rows: Floats, target: Floats, choices: npt.NDArray[np.int64], seed: int) -> Floats:
    """The residual of each row, learned without its choice."""
    count = int(choices.max()) + 1
    folds = min(FOLDS, count)
    fold_of = np.random.default_rng(seed).permutation(count) % max(folds, 1)
    found = np.zeros(len(rows))
    for fold in range(folds if count > 1 else 0):
        out = fold_of[choices] == fold
        members = _members(rows[~out], target[~out], choices[~out], seed, members=2)
        found[out] = stacked(members, rows[out]).mean(0)
    return found


def _members(
    rows: Floats, target: Floats, choices: npt.NDArray[np.int64], seed: int, members: int = MEMBERS
) -> list[Member]:
    from sklearn.ensemble import GradientBoostingRegressor

    made, draw, names = [], np.random.default_rng(seed), np.unique(choices)
    for i in range(members):
        drawn = draw.choice(names, len(names))
        at = np.concatenate([np.flatnonzero(choices == c) for c in drawn])
        if len(at) < LEAST_SAMPLES:
            at = draw.choice(len(rows), len(rows))
        booster: Any = GradientBoostingRegressor(
            n_estimators=_TREES,
            max_depth=_DEPTH,
            learning_rate=_RATE,
            subsample=_SHARE,
            min_samples_leaf=_LEAF,
            loss="huber",
            random_state=seed * MEMBERS + i,
        )
        booster.fit(rows[at], target[at])
        made.append(_member(booster))
    return made


def _member(booster: Any) -> Member:
    """Takes a fitted ensemble of scikit-learn apart."""
    trees = []
    for (one,) in booster.estimators_:
        tree = one.tree_
        leaf = tree.children_left < 0
        trees.append(
            Tree(
                feature=tuple(int(f) for f in np.where(leaf, -1, tree.feature)),
                threshold=tuple(float(f"{t:.8g}") for t in tree.threshold),
                left=tuple(map(int, tree.children_left)),
                right=tuple(map(int, tree.children_right)),
                value=tuple(float(f"{booster.learning_rate * v:.5g}") for v in tree.value[:, 0, 0]),
            )
        )
    return Member(base=float(booster.init_.constant_[0, 0]), trees=tuple(trees))
