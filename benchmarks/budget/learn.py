"""Learns from the small tasks what a probe says of a whole training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import autopar.quality
from autopar.quality.degradation import FILE, Lesson, Map, learn
from benchmarks.budget.outcome import Key, Outcome
from benchmarks.budget.probes import ProbeOutcome
from benchmarks.budget.tasks import LEARNED

MAP = Path(autopar.quality.__file__).parent / FILE


def lessons(outcomes: Mapping[Key, Outcome], probes: Mapping[Key, ProbeOutcome]) -> list[Lesson]:
    """Of each training of a small task whose method was probed on it. Where the probe diverged, there is none: such
    plans are left out whatever the map says."""
    found = []
    for key in sorted(outcomes.keys() & probes.keys()):
        outcome, probed = outcomes[key], probes[key].probed
        if outcome.task in LEARNED and 0 < probed.divergence < math.inf:
            lost = math.inf if outcome.lost is None else outcome.lost
            found.append(Lesson(outcome.task.rsplit("_", 1)[0], probed.divergence, lost))
    return found


def shipped_map(outcomes: Mapping[Key, Outcome], probes: Mapping[Key, ProbeOutcome]) -> Map:
    """Learns the map, and writes it where autopar reads it."""
    learned = learn(lessons(outcomes, probes))
    learned.save(MAP)
    return learned
