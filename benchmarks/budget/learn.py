"""Learns from the small tasks what a probe says of a whole training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import autopar
import autopar.quality
from autopar.quality.degradation import FILE, Lesson, Map, learn
from autopar.quality.methods import method_of, optimizer_of
from autopar.strategies import Context
from benchmarks.budget.methods import METHODS
from benchmarks.budget.outcome import Key, Outcome
from benchmarks.budget.probes import ProbeOutcome
from benchmarks.budget.tasks import LEARNED, TASKS

MAP = Path(autopar.quality.__file__).parent / FILE


def lessons(outcomes: Mapping[Key, Outcome], probes: Mapping[Key, ProbeOutcome]) -> list[Lesson]:
    """Of each training of a small task whose method was probed on it. Where the probe diverged, there is none: such
    plans are left out whatever the map says."""
    found = []
    for key in sorted(outcomes.keys() & probes.keys()):
        outcome, probed = outcomes[key], probes[key].probed
        if outcome.task in LEARNED and 0 < probed.divergence < math.inf:
            lost = math.inf if outcome.lost is None else outcome.lost
            like = outcome.task if METHODS[outcome.method].of_layers else "planted_adamw"
            family, method = outcome.task.rsplit("_", 1)[0], method_called(outcome.method, like)
            found.append(Lesson(family, probed.divergence, lost, method, optimizer_called(outcome.task)))
    return found


@cache
def method_called(name: str, of: str) -> str:
    """What autopar's map calls one of the benchmark's methods on a task."""
    task = TASKS[of]
    model = task.build(0)
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(task.ranks),
        example_inputs=task.rank_batch(0, 0, 0),
        loss_fn=task.loss_fn,
        optimizer=task.optimizer(model),
        strategy=METHODS[name].probe,
        fidelity=METHODS[name].fidelity,
    )
    return method_of(plan.groups, Context(task.ranks))


@cache
def optimizer_called(task: str) -> str:
    """What autopar's map calls a task's optimizer."""
    return optimizer_of(TASKS[task].optimizer(TASKS[task].build(0)))


def shipped_map(outcomes: Mapping[Key, Outcome], probes: Mapping[Key, ProbeOutcome]) -> Map:
    """Learns the map, and writes it where autopar reads it."""
    learned = learn(lessons(outcomes, probes))
    learned.save(MAP)
    return learned
