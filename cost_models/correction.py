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

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.errors import SpecError
from autopar.spec.files import read_file, write_file
from autopar.spec.validation import explain

Floats = npt.NDArray[np.float64]

MAX_BYTES = 256 << 20
"""Of a saved correction."""
CLIP = 0.3
"""Largest residual, in logarithms: a prediction is corrected by a third at most."""
FADE = 0.25
"""Outside of the range of a feature, the residual falls to 1/e on this fraction of the range."""
USUAL = 3.0
"""Times the median disagreement of the ensembles, from which on the residual is believed less."""


class Tree(BaseModel):
    """A regression tree. Node 0 is the root; a leaf's `feature` is -1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    """Where a feature is at most the threshold."""
    right: tuple[int, ...]
    value: tuple[float, ...]


class Member(BaseModel):
    """One boosted ensemble."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: float
    trees: tuple[Tree, ...]


class _Stack:
    """All trees of all members, side by side, so that a row goes down all of them at once."""

    def __init__(self, members: Sequence[Member]) -> None:
        trees = [t for m in members for t in m.trees]
        most = max((len(t.feature) for t in trees), default=1)
        self.feature, self.left, self.right = (np.zeros((len(trees), most), np.int64) for _ in range(3))
        self.threshold, self.value = np.full((len(trees), most), np.inf), np.zeros((len(trees), most))
        for i, tree in enumerate(trees):
            inner = np.asarray(tree.feature) >= 0
            here, itself = slice(len(tree.feature)), np.arange(len(tree.feature))
            self.feature[i, here] = np.where(inner, tree.feature, 0)
            self.threshold[i, here] = np.where(inner, tree.threshold, np.inf)
            self.left[i, here], self.right[i, here] = (np.where(inner, x, itself) for x in (tree.left, tree.right))
            self.value[i, here] = tree.value
        self.bases = np.array([m.base for m in members])
        self.starts = np.cumsum([0, *(len(m.trees) for m in members)])

    def of(self, rows: Floats) -> Floats:
        """What each member says of each row: [member, row]."""
        every, at = np.arange(len(self.feature)), np.arange(len(rows))[:, None]
        node = np.zeros((len(rows), len(every)), np.int64)
        while True:
            goes_left = rows[at, self.feature[every, node]] <= self.threshold[every, node]
            below = np.where(goes_left, self.left[every, node], self.right[every, node])
            if (below == node).all():
                break
            node = below
        values = self.value[every, node]
        sums = [values[:, a:b].sum(1) for a, b in pairwise(self.starts)]
        return np.stack([base + total for base, total in zip(self.bases, sums, strict=True)])


def stacked(members: Sequence[Member], rows: Floats) -> Floats:
    """The residual of each row by each member: [member, row]."""
    return _Stack(members).of(rows)


class Correction(BaseModel):
    """What was learned; `of` applies it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    features: tuple[str, ...]
    members: tuple[Member, ...]
    lowest: tuple[float, ...]
    """Of each feature, where it was learned."""
    highest: tuple[float, ...]
    center: tuple[float, ...]
    """Its mean there."""
    spread: tuple[float, ...]
    """Its standard deviation; 1 where it was always the same."""
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
        return self.of(rows)[0]

    def interval(self, rows: Floats) -> Floats:
        """Half of the width of the interval, in logarithms: wider where less was learned."""
        return self.of(rows)[1]

    def of(self, rows: Floats) -> tuple[Floats, Floats]:
        """Both of these."""
        each = self._stack.of(rows)
        known = self._familiarity(rows, each)
        found: Floats = np.clip(self.belief * known * each.mean(0), -CLIP, CLIP)
        return found, known * self.inside + (1 - known) * self.outside

    def _familiarity(self, rows: Floats, each: Floats) -> Floats:
        """How near each row is to what was learned from: 1 within, 0 far away. `each`: what the members say."""
        low: Floats = np.asarray(self.lowest)
        high: Floats = np.asarray(self.highest)
        span = np.maximum(high - low, 1e-9)
        beyond = np.maximum(np.maximum(low - rows, rows - high), 0) / span
        usual = max(USUAL * self.disagreement, 1e-9)
        agreement = np.minimum(1, (usual / np.maximum(each.std(0), usual)) ** 2)
        known: Floats = np.exp(-beyond.max(1) / FADE) * agreement
        return known

    @cached_property
    def _stack(self) -> _Stack:
        return _Stack(self.members)

    def save(self, path: str | Path) -> None:
        write_file(path, self.model_dump_json(), "learned correction")

    @classmethod
    def load(cls, path: str | Path) -> Correction:
        """Raises `SpecError` where the file is no correction."""
        try:
            return cls.model_validate_json(read_file(path, "learned correction", MAX_BYTES))
        except ValidationError as e:
            raise SpecError(f"{path} cannot be read as a learned correction: {explain(e, cls)}") from e
