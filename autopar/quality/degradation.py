"""From a probe to what a whole training will lose: a map that was learned from trainings of other tasks.

What is lost is a part of what exact training gains over the best prediction that looks at no input; all of it at most.
The map has, for a row of divergences, the median of what trainings lost whose probes diverged about as much, and a high
quantile of it, both made to rise with the divergence. The quantile is that of split conformal prediction (Vovk,
Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005): of n trainings, the ceil((n + 1) c)-th least, so
that of few, the worst counts. It holds as far as a new task is like those that were learned from, which
`python -m benchmarks.budget` trains; with `--learn`, it writes the map.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from autopar.quality.probe import Probed

FILE = "degradation.json"
CONFIDENCE = 0.95
KNOTS = tuple(float(f"{10 ** (i / 4):.3g}") for i in range(-10, 3))
"""Divergences that the map says something of, from 0.00316 to 3.16; between them, it is interpolated."""
NEAR = 2.0
"""Trainings count at a knot whose probes diverged by at most so many times as much, or as little."""
FEWEST = 8
"""Trainings that count at a knot, at least: where fewer are near, the nearest do."""


@dataclass(frozen=True)
class Lesson:
    """One training of a small task with a method, and the probe of it."""

    family: str
    """Tasks that are alike, and are left out together where the map is judged."""
    divergence: float
    lost: float
    """As a part of what exact training gains; infinite where the training diverged."""


@dataclass(frozen=True)
class Loss:
    """What a training is expected to lose, as a part of what exact training gains."""

    expected: float
    bound: float
    """At most so much, with the confidence of the map."""


@dataclass(frozen=True)
class Map:
    """What was learned."""

    divergence: tuple[float, ...]
    expected: tuple[float, ...]
    """At these divergences."""
    bound: tuple[float, ...]
    confidence: float
    covered: float
    """Of lessons of families that were left out, how many lost at most the bound that was learned without them."""
    lessons: int
    families: int

    def of(self, probed: Probed) -> Loss:
        """What a plan will lose that was probed: everything, where its probe ended in no numbers."""
        return Loss(*self._at(probed.divergence)) if math.isfinite(probed.divergence) else Loss(1.0, 1.0)

    def _at(self, divergence: float) -> tuple[float, float]:
        place, places = math.log(max(divergence, self.divergence[0])), np.log(self.divergence)
        return float(np.interp(place, places, self.expected)), float(np.interp(place, places, self.bound))

    @classmethod
    def load(cls, text: str) -> Map:
        """From what `save` wrote."""
        told: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        return cls(**told)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def learn(lessons: Sequence[Lesson], confidence: float = CONFIDENCE) -> Map:
    """Learns the map, and tries it on each family without having learned from it. Raises `ValueError` where lessons are
    of fewer than two families."""
    families = sorted({one.family for one in lessons})
    if len(families) < 2:
        raise ValueError(f"lessons of {len(families)} families: a bound needs at least two")
    covered = []
    for family in families:
        without = _learned([one for one in lessons if one.family != family], confidence, 0.0, len(families) - 1)
        mine = [one for one in lessons if one.family == family]
        covered += [min(one.lost, 1.0) <= without._at(one.divergence)[1] for one in mine]
    return _learned(lessons, confidence, sum(covered) / len(covered), len(families))


def _learned(lessons: Sequence[Lesson], confidence: float, covered: float, families: int) -> Map:
    places = np.log([one.divergence for one in lessons])
    lost = np.array([min(one.lost, 1.0) for one in lessons])
    expected, bound = [0.0], [0.0]
    for knot in KNOTS:
        distance = np.abs(places - math.log(knot))
        near = lost[distance <= math.log(NEAR)]
        if len(near) < FEWEST:
            near = lost[np.argsort(distance, kind="stable")[:FEWEST]]
        near = np.sort(near)
        rank = min(math.ceil((len(near) + 1) * confidence), len(near))
        expected.append(max(expected[-1], float(np.median(near))))
        bound.append(max(bound[-1], float(near[rank - 1])))
    rows = [tuple(float(f"{value:.4g}") for value in row[1:]) for row in (expected, bound)]
    return Map(KNOTS, rows[0], rows[1], confidence, round(covered, 4), len(lessons), families)


@cache
def shipped() -> Map:
    """The map that comes with autopar."""
    return Map.load(files("autopar.quality").joinpath(FILE).read_text())
