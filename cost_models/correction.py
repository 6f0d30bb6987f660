"""A learned correction of predicted times: a factor, from physical features of a plan.

    measured = predicted x exp(residual(features))

The residual is the mean of several boosted ensembles of small trees, each of which has learned from other choices. It
is clipped, and fades to nothing where features lie outside of what was learned from, or where the ensembles disagree:
on GPT training times, such a residual takes a third off the error of a fitted analytic model within what it has seen,
and makes it worse on larger models. How much of it is believed at all is decided on choices that were left out, and so
is the interval. Features are ratios and logarithms, never names of models or devices.

Saved as JSON, tree by tree; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from autopar.errors import SpecError

Floats = npt.NDArray[np.float64]

CLIP = 0.3
"""Largest residual, in logarithms: a prediction is corrected by a third at most."""
COVERAGE = 0.9
"""Part of the measurements that shall lie within the interval."""
MEMBERS, FOLDS = 8, 5
BELIEFS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""How much of the residual may be believed."""
FADE = 0.25
"""Outside of the range of a feature, the residual falls to 1/e on this fraction of the range."""
USUAL = 3.0
"""Times the median disagreement of the ensembles, from which on the residual is believed less."""
LEAST_SAMPLES = 20
_TREES, _DEPTH, _RATE, _SHARE, _LEAF = 120, 3, 0.06, 0.7, 4


class Tree(BaseModel):
    """A regression tree. Node 0 is the root; a leaf's `feature` is -1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    """Where a feature is at most the threshold."""
    right: tuple[int, ...]
    value: tuple[float, ...]

    def of(self, rows: Floats) -> Floats:
        """The value of each row's leaf."""
        feature, left, right = (np.asarray(x) for x in (self.feature, self.left, self.right))
        threshold, value = np.asarray(self.threshold), np.asarray(self.value)
        node, every = np.zeros(len(rows), np.int64), np.arange(len(rows))
        while (inner := feature[node] >= 0).any():
            at = node[inner]
            goes_left = rows[every[inner], feature[at]] <= threshold[at]
            node[inner] = np.where(goes_left, left[at], right[at])
        return value[node]


class Member(BaseModel):
    """One boosted ensemble."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: float
    trees: tuple[Tree, ...]

    def of(self, rows: Floats) -> Floats:
        """Its residual for each row."""
        total = np.full(len(rows), self.base)
        for tree in self.trees:
            total += tree.of(rows)
        return total


class Correction(BaseModel):
    """What was learned; `residual` and `interval` apply it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    features: tuple[str, ...]
    members: tuple[Member, ...]
    lowest: tuple[float, ...]
    """Of each feature, where it was learned."""
    highest: tuple[float, ...]
    disagreement: float
    """Standard deviation over the members that is usual where it was learned."""
    belief: float
    inside: float
    """Half of the interval, in logarithms, where it was learned."""
    outside: float
    """The same of a prediction that is not corrected."""
    samples: int

    def residual(self, rows: Floats) -> Floats:
        """The logarithm of the factor for each row of features."""
        each = np.stack([m.of(rows) for m in self.members])
        weight = self.belief * self.familiarity(rows, each)
        found: Floats = np.clip(weight * each.mean(0), -CLIP, CLIP)
        return found

    def interval(self, rows: Floats) -> Floats:
        """Half of the width of the interval, in logarithms: wider where less was learned."""
        known = self.familiarity(rows)
        return known * self.inside + (1 - known) * self.outside

    def familiarity(self, rows: Floats, each: Floats | None = None) -> Floats:
        """How near each row is to what was learned from: 1 within, 0 far away."""
        if each is None:
            each = np.stack([m.of(rows) for m in self.members])
        low: Floats = np.asarray(self.lowest)
        high: Floats = np.asarray(self.highest)
        span = np.maximum(high - low, 1e-9)
        beyond = np.maximum(np.maximum(low - rows, rows - high), 0) / span
        usual = max(USUAL * self.disagreement, 1e-9)
        agreement = np.minimum(1, (usual / np.maximum(each.std(0), usual)) ** 2)
        known: Floats = np.exp(-beyond.max(1) / FADE) * agreement
        return known

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json())

    @classmethod
    def load(cls, path: str | Path) -> Correction:
        """Raises `SpecError` where the file is no correction."""
        try:
            return cls.model_validate_json(Path(path).read_text())
        except (OSError, ValueError) as e:
            raise SpecError(f"{path} cannot be read as a learned correction: {e}") from e


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
    each = np.stack([m.of(rows) for m in members])
    errors = np.abs(target - np.clip(belief * left_out, -CLIP, CLIP))
    return Correction(
        features=tuple(names),
        members=tuple(members),
        lowest=tuple(map(float, rows.min(0))),
        highest=tuple(map(float, rows.max(0))),
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
        found[out] = np.mean([m.of(rows[out]) for m in members], axis=0)
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
                threshold=tuple(map(float, tree.threshold)),
                left=tuple(map(int, tree.children_left)),
                right=tuple(map(int, tree.children_right)),
                value=tuple(float(booster.learning_rate * v) for v in tree.value[:, 0, 0]),
            )
        )
    return Member(base=float(booster.init_.constant_[0, 0]), trees=tuple(trees))
