"""Runs several systems on the same hosts in turn: a block of steps of one, the same steps of the other.

The processes of every system live all the time, and those whose turn it is not wait for a request. So the machine's
slow drift hits both alike, and a ratio is taken over each pair of blocks. Pairs alternate in who goes first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from autopar.lab import Host, Job
from benchmarks.demo.task import Task

START_TIMEOUT_S = 240.0
"""Imports, capture and the first step of all ranks, on few cores."""
BLOCK_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Block:
    """Consecutive steps of one system."""

    system: str
    first: int
    step_s: tuple[float, ...]
    """Time of each step, of the rank that took longest."""
    losses: tuple[float, ...]
    """Mean over the global batch."""
    sent_bytes: tuple[float, ...] | None
    """Per rank and step, seen by the interfaces; None where they cannot be read."""

    @property
    def mean_step_s(self) -> float:
        return sum(self.step_s) / len(self.step_s)


Progress = Callable[[Block], None]


@contextmanager
def started(hosts: Sequence[Host], task: Task, plan: str) -> Iterator[dict[str, Job]]:
    """The ranks of both systems, one on each of `hosts`."""
    worker = [sys.executable, "-m", "benchmarks.demo.worker"]
    arguments = json.dumps(asdict(task))
    with ExitStack() as stack:
        yield {
            "autopar": stack.enter_context(Job(hosts, [*worker, "autopar", arguments, plan])),
            "ddp": stack.enter_context(Job(hosts, [*worker, "ddp", arguments])),
        }


def warm_up(jobs: Mapping[str, Job], steps: int, progress: Progress) -> list[Block]:
    """The first steps of every system; they count for the losses, not for the times."""
    blocks = []
    for name, job in jobs.items():
        blocks.append(_run(name, job, 0, steps, START_TIMEOUT_S))
        progress(blocks[-1])
    return blocks


def alternate(jobs: Mapping[str, Job], first: int, steps: int, block_steps: int, progress: Progress) -> list[Block]:
    """Steps `first` to `first + steps` of every system, `block_steps` at a time."""
    blocks = []
    order = list(jobs)
    for start in range(first, first + steps, block_steps):
        for name in order:
            count = min(block_steps, first + steps - start)
            blocks.append(_run(name, jobs[name], start, count, BLOCK_TIMEOUT_S))
            progress(blocks[-1])
        order.reverse()
    return blocks


def _run(name: str, job: Job, first: int, count: int, timeout_s: float) -> Block:
    before = _sent(job.hosts)
    answers = job.ask({"first": first, "count": count}, timeout_s)
    after = _sent(job.hosts)
    sent = None
    if before is not None and after is not None:
        sent = tuple((b - a) / count for a, b in zip(before, after, strict=True))
    return Block(
        system=name,
        first=first,
        step_s=tuple(max(times) for times in zip(*(a["times_s"] for a in answers), strict=True)),
        losses=tuple(sum(each) / len(each) for each in zip(*(a["losses"] for a in answers), strict=True)),
        sent_bytes=sent,
    )


def _sent(hosts: Sequence[Host]) -> list[float] | None:
    """Bytes sent so far by each rank; ranks on one host share its counter equally."""
    try:
        return [host.bytes_sent() / hosts.count(host) for host in hosts]
    except OSError:
        return None
