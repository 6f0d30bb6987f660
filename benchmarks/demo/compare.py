"""Starts the ranks of both systems, and has them take turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from autopar.lab import Host, Job
from benchmarks.demo.task import Task
from benchmarks.interleaved import Block, Progress, System, Turns

__all__ = ["Block", "alternate", "started"]


@contextmanager
def started(hosts: Sequence[Host], task: Task, plan: str) -> Iterator[list[System]]:
    """The ranks of both systems, one on each of `hosts`."""
    worker = [sys.executable, "-m", "benchmarks.demo.worker"]
    arguments = json.dumps(asdict(task))
    with ExitStack() as stack:
        yield [
            _system("autopar", stack.enter_context(Job(hosts, [*worker, "autopar", arguments, plan]))),
            _system("ddp", stack.enter_context(Job(hosts, [*worker, "ddp", arguments]))),
        ]


def alternate(
    systems: Sequence[System], warm_up_steps: int, steps: int, block_steps: int, progress: Progress
) -> tuple[list[Block], list[Block]]:
    """Warms every system up, then takes `steps` steps of each, `block_steps` at a time; returns both parts' blocks."""
    turns = Turns(progress)
    warm_up = turns.warm_up(systems, warm_up_steps)
    counts = [min(block_steps, steps - start) for start in range(0, steps, block_steps)]
    return warm_up, [block for count in counts for block in turns.round([(s, count) for s in systems])]


def _system(name: str, job: Job) -> System:
    return System(name, job.hosts, lambda first, count, timeout_s: job.ask({"first": first, "count": count}, timeout_s))
