"""Workloads by name: how the ranks of a benchmark, which are processes of their own, get the one that is meant."""

from __future__ import annotations

from benchmarks.demo import task as demo
from benchmarks.suite import workload_named
from benchmarks.zoo.small import SMALL
from benchmarks.zoo.tiny import TINY
from benchmarks.zoo.uncaptured import UNCAPTURED
from benchmarks.zoo.unseen import UNSEEN
from benchmarks.zoo.workload import Workload


def any_workload(name: str) -> Workload:
    """A workload of the suite, a small or tiny one, one that no graph shows or nothing was learned from, or the demo's;
    raises `KeyError` with the nearest right name."""
    if name.startswith(f"{demo.NAME} "):
        return demo.named(name)
    return (SMALL | TINY | UNCAPTURED | UNSEEN).get(name) or workload_named(name)
