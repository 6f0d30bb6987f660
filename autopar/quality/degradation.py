"""From a probe to what a whole training will lose: a map that was learned from trainings of other tasks.

What is lost is a part of what exact training gains over the best prediction that looks at no input; all of it at most.
The map has, for a row of divergences, quantiles of what trainings lost whose probes diverged about as much, the median
and a high one among them, all made to rise with the divergence. The high one is that of split conformal prediction
(Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005): of n trainings, the ceil((n + 1) c)-th
least, so that of few, the worst counts. Of a method that many tasks were trained with, what they lost by it is another
such bound, as some lose little wherever they are tried: the lower one holds. Some methods lose little under SGD and
more under Adam, whose steps are as long where gradients are small: where enough trainings were made with a method and
one of these optimizers, only those count for the two together; where few were, the worse of theirs and of all. No bound
is lower than that of rounding to 16 bits: after a few hundred steps, whatever rounds leads to another training, and
what that loses, or gains, is chance. All holds as far as a new task is like those that were learned from, which `python
-m benchmarks.budget` trains; with `--learn`, it writes the map.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.quality.probe import Probed

FILE = "degradation.json"
CONFIDENCE = 0.95
KNOTS = tuple(float(f"{10 ** (i / 4):.3g}") for i in range(-10, 3))
"""Divergences that the map says something of, from 0.00316 to 3.16; between them, it is interpolated."""
NEAR = 2.0
"""Trainings count at a knot whose probes diverged by at most so many times as much, or as little."""
FEWEST = 8
"""Trainings that count at a knot, at least: where fewer are near, the nearest do."""
FEWEST_OF_METHOD = 16
"""Trainings with one method, of which a bound can be said."""
FINEST = "wire=bfloat16"
"""The method that loses least, as `method_of` names it."""
USED = 0.02
"""Bounds up to this are what plans are taken by: those that are higher hold easily, and say little."""
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""For each of these parts of trainings, the map says how much they lost at most."""
_MEDIAN = LEVELS.index(0.5)


@dataclass(frozen=True)
class Lesson:
    """One training of a small task with a method, and the probe of it."""

    family: str
    """Tasks that are alike, and are left out together where the map is judged."""
    divergence: float
    lost: float
    """As a part of what exact training gains; infinite where the training diverged."""
    method: str = ""
    """As `method_of` names it; empty where it is not known."""
    optimizer: str = ""
    """As `optimizer_of` names it."""


@dataclass(frozen=True)
class Loss:
    """What a training is expected to lose, as a part of what exact training gains."""

    expected: float
    bound: float
    """At most so much, with the confidence of the map."""
    likely: tuple[float, ...] = ()
    """At most so much, in the parts of trainings that `LEVELS` says."""

    def chance_within(self, budget: float) -> float:
        """The part of trainings that lose at most `budget`, one of `LEVELS`, 0 or 1."""
        if self.bound <= budget:
            return 1.0
        return max((level for level, lost in zip(LEVELS, self.likely, strict=False) if lost <= budget), default=0.0)


@dataclass(frozen=True)
class OfMethod:
    """What trainings with one method lost."""

    likely: tuple[float, ...]
    """At `LEVELS`."""
    bound: float
    divergence: float
    """The largest of their probes; of one that diverges by more than `NEAR` times as much they say nothing."""
    lessons: int


@dataclass(frozen=True)
class Map:
    """What was learned."""

    divergence: tuple[float, ...]
    likely: tuple[tuple[float, ...], ...]
    """For each of `LEVELS`, what is lost at these divergences."""
    bound: tuple[float, ...]
    methods: Mapping[str, OfMethod]
    """By the methods' names, and by those with an optimizer's behind them, as `_under` says."""
    floor: float
    """What `FINEST` loses at most; no bound is lower."""
    confidence: float
    covered: float
    """Of lessons of families that were left out, and whose bound, learned without them, was at most `USED`: how many
    lost at most that."""
    lessons: int
    families: int

    def of(self, probed: Probed, method: str = "", optimizer: str = "") -> Loss:
        """What a plan will lose that was probed: everything, where its probe ended in no numbers."""
        if not math.isfinite(probed.divergence):
            return Loss(1.0, 1.0)
        found, known = self._at(probed.divergence), self._of_method(method, optimizer)
        if known is not None and probed.divergence <= NEAR * known.divergence and known.bound < found.bound:
            found = Loss(known.likely[_MEDIAN], known.bound, known.likely)
        return replace(found, bound=max(found.bound, self.floor))

    def _of_method(self, method: str, optimizer: str) -> OfMethod | None:
        of_all, own = self.methods.get(method), self.methods.get(_under(method, optimizer))
        if of_all is None or own is None or own.lessons >= FEWEST_OF_METHOD:
            return own or of_all
        return max(of_all, own, key=lambda one: one.bound)

    def _of(self, lesson: Lesson) -> Loss:
        return self.of(Probed(lesson.divergence, 0.0, 0.0, 0.0), lesson.method, lesson.optimizer)

    def _at(self, divergence: float) -> Loss:
        place, places = math.log(max(divergence, self.divergence[0])), np.log(self.divergence)
        bound, *likely = (float(np.interp(place, places, row)) for row in (self.bound, *self.likely))
        return Loss(likely[_MEDIAN], bound, tuple(likely))

    @classmethod
    def load(cls, text: str) -> Map:
        """From what `save` wrote."""
        told: dict[str, Any] = _tuples(json.loads(text))
        methods = {name: OfMethod(**one) for name, one in told.pop("methods").items()}
        return cls(**told, methods=methods)

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
        bounds = [(one, without._of(one).bound) for one in lessons if one.family == family]
        covered += [min(one.lost, 1.0) <= bound for one, bound in bounds if bound <= USED]
    return _learned(lessons, confidence, sum(covered) / max(1, len(covered)), len(families))


def _learned(lessons: Sequence[Lesson], confidence: float, covered: float, families: int) -> Map:
    places = np.log([one.divergence for one in lessons])
    lost = np.array([min(one.lost, 1.0) for one in lessons])
    rows = [(0.0,) * (len(LEVELS) + 1)]
    for knot in KNOTS:
        distance = np.abs(places - math.log(knot))
        near = lost[distance <= math.log(NEAR)]
        if len(near) < FEWEST:
            near = lost[np.argsort(distance, kind="stable")[:FEWEST]]
        rows.append(tuple(np.maximum(rows[-1], (_bound(near, confidence), *np.quantile(near, LEVELS)))))
    bound, *likely = (_rounded(row) for row in zip(*rows[1:], strict=True))
    by_method = defaultdict[str, list[Lesson]](list)
    for one in lessons:
        for name in {one.method, _under(one.method, one.optimizer)} if one.method else ():
            by_method[name].append(one)
    methods = {}
    for name, mine in sorted(by_method.items()):
        if len(by_method[mine[0].method]) < FEWEST_OF_METHOD:
            continue
        of = np.array([min(one.lost, 1.0) for one in mine])
        at = _rounded(np.maximum(0.0, (_bound(of, confidence), *np.quantile(of, LEVELS))))
        methods[name] = OfMethod(at[1:], at[0], max(one.divergence for one in mine), len(mine))
    floor = methods[FINEST].bound if FINEST in methods else 0.0
    return Map(KNOTS, tuple(likely), bound, methods, floor, confidence, round(covered, 4), len(lessons), families)


def _under(method: str, optimizer: str) -> str:
    return f"{method} under {optimizer}" if optimizer else method


def _bound(lost: NDArray[np.float64], confidence: float) -> float:
    rank = min(math.ceil((len(lost) + 1) * confidence), len(lost))
    return float(np.sort(lost)[rank - 1])


def _rounded(row: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in row)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def shipped() -> Map:
    """The map that comes with autopar."""
    return Map.load(files("autopar.quality").joinpath(FILE).read_text())
