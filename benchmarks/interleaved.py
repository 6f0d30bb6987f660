"""Runs several systems in turn: a block of steps of one, a block of the next, and round again. What every comparison of
times stands on.

The ranks of every system live all the time, and those whose turn it is not wait for a request. So the machine's slow
drift hits all alike, and a ratio is taken over the blocks of one round. Rounds alternate in who goes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.lab import Host, serve

if TYPE_CHECKING:
    import torch

START_TIMEOUT_S = 240.0
"""Imports, capture and the first step of all ranks, on few cores."""
BLOCK_TIMEOUT_S = 180.0

Answer = Mapping[str, Any]
"""What a rank measured: `times_s` and `losses`, one of each a step."""


@dataclass(frozen=True)
class Block:
    """Consecutive steps of one system."""

    system: str
    first: int
    step_s: tuple[float, ...]
    """Time of each step that was timed, of the rank that took longest."""
    losses: tuple[float, ...]
    """Of each step from `first` on, the mean over the global batch."""
    sent_bytes: tuple[float, ...] | None
    """Per rank and step, seen by the interfaces; None where they cannot be read."""

    @property
    def mean_step_s(self) -> float:
        return sum(self.step_s) / len(self.step_s)


Progress = Callable[[Block], None]


@dataclass(frozen=True)
class System:
    """Something that trains, on ranks that wait for their turn."""

    name: str
    hosts: Sequence[Host]
    """Of each rank."""
    run: Callable[[int, int, float], Sequence[Answer]]
    """`run(first, count, timeout_s)` takes steps `first` to `first + count`, and returns the answer of each rank."""
    period: int = 1
    """After how many steps it does the same again: blocks are whole periods, lest one holds more of the cheap steps."""


class Turns:
    """Who has taken how many steps, and who is next."""

    def __init__(self, progress: Progress = lambda block: None) -> None:
        self._progress = progress
        self._taken: dict[str, int] = {}
        self._rounds = 0

    def warm_up(self, systems: Iterable[System], steps: int) -> list[Block]:
        """The first steps of each system; they count for the losses, not for the times."""
        return [self._take(system, steps, START_TIMEOUT_S) for system in systems]

    def round(self, blocks: Sequence[tuple[System, int]], untimed: int = 0) -> list[Block]:
        """The next block of each system, in turn, of at least so many steps and whole periods. `untimed`: steps
        that each system takes before its block, without being timed. Parameters that the last step of a block leaves on
        their way arrive during the other systems' turns, so the step that finds them there is too fast to count."""
        order = blocks if self._rounds % 2 == 0 else blocks[::-1]
        self._rounds += 1
        return [self._take(s, -(-steps // s.period) * s.period, BLOCK_TIMEOUT_S, untimed) for s, steps in order]

    def _take(self, system: System, count: int, timeout_s: float, untimed: int = 0) -> Block:
        first = self._taken.get(system.name, 0)
        count += untimed
        before = _sent(system.hosts)
        answers = system.run(first, count, timeout_s)
        after = _sent(system.hosts)
        sent = None
        if before is not None and after is not None:
            sent = tuple((b - a) / count for a, b in zip(before, after, strict=True))
        block = Block(
            system=system.name,
            first=first,
            step_s=tuple(max(times) for times in zip(*(a["times_s"][untimed:] for a in answers), strict=True)),
            losses=tuple(sum(each) / len(each) for each in zip(*(a["losses"] for a in answers), strict=True)),
            sent_bytes=sent,
        )
        self._taken[system.name] = first + count
        self._progress(block)
        return block


def _sent(hosts: Sequence[Host]) -> list[float] | None:
    """Bytes sent so far by each rank; ranks behind one interface share its counter equally."""
    interfaces = [(host.namespace, host.interface) for host in hosts]
    try:
        each = {interface: host.bytes_sent() for interface, host in dict(zip(interfaces, hosts, strict=True)).items()}
    except OSError:
        return None
    return [each[i] / interfaces.count(i) for i in interfaces]


def time_steps(step: Callable[[Any], torch.Tensor], batches: Sequence[Any]) -> dict[str, list[float]]:
    """In a rank: takes one step on each batch, all ranks from the same moment on; returns what `Answer` says."""
    import torch.distributed as dist

    dist.barrier()
    times_s, losses = [], []
    for batch in batches:
        start = time.perf_counter()
        losses.append(step(batch).item())
        times_s.append(time.perf_counter() - start)
    return {"times_s": times_s, "losses": losses}


def serve_requests(answer: Callable[[], Callable[[dict[str, Any]], Mapping[str, Any]]]) -> None:
    """In a rank: joins the others, on one thread as they share the machine's cores, and answers the requests of a `Job`
    until nobody asks any more. `answer` is called once in the process group, and gives what answers."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(answer())
    dist.destroy_process_group()
