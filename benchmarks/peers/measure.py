"""Measures one case: every system is tuned, then takes its turn with the others.

Systems live in the ranks in groups, as many as memory holds, and autopar is in every group: so each peer has rounds
in common with autopar, and two peers of different groups are compared through it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.harness import Machine
from benchmarks.interleaved import Progress, System, Turns
from benchmarks.peers.case import Case, Effort
from benchmarks.peers.entrants import Entrant, Say, enter, first_line
from benchmarks.peers.outcome import COMPARED_STEPS, REFERENCE, CaseOutcome, Entry
from benchmarks.peers.ranks import Ranks, SystemFailed

MIN_ROUNDS = 2
SLOW = 1.5
"""A system that takes this many times as long as the fastest of its fidelity takes part in the first rounds only."""
RESERVE_BYTES = 3 << 30
"""Memory left alone, for the batches and activations of whoever's turn it is, and for the machine."""
MEMORY_MARGIN = 1.3


class Contest:
    """All systems of one case on living ranks. For one use: `run`."""

    def __init__(
        self, case: Case, ranks: Ranks, effort: Effort, say: Say, progress: Progress = lambda block: None
    ) -> None:
        """`say` is told what is done, `progress` every block of steps."""
        self.case, self.ranks, self.effort = case, ranks, effort
        self._say, self._progress = say, progress
        self._absent: dict[str, str] = {}
        self._entrants: list[Entrant] = []
        self._alive: dict[str, System] = {}
        self._turns = Turns(self._progress)
        self._rounds = itertools.count()
        self._need_bytes = 0

    def run(self, names: Sequence[str], network: str, emulated: bool) -> CaseOutcome:
        """Measures the peers of these names, and autopar within each of their fidelities."""
        machine = str(Machine.here())
        self._entrants, self._absent = enter(names, self.case, self.ranks, self.effort, self._say)
        done: set[str] = set()
        while any(e.key not in done for e in self._entrants):
            try:
                group = self._fill(done)
                self._take_rounds(group)
                self._catch_up(group)
                done |= {e.key for e in group}
                for entrant in group:
                    if not entrant.ours:
                        self.ranks.drop(entrant.key)
                        del self._alive[entrant.key]
            except SystemFailed as e:
                self._strike_out(e)
        with suppress(SystemFailed):  # all is measured; the next case starts new ranks
            for key in self._alive:
                self.ranks.drop(key)
        entries = [
            Entry(name, peer.fidelity, measured)
            for entrant in self._entrants
            for measured in [entrant.measured()]
            for name, peer in entrant.names
        ]
        case = self.case
        return CaseOutcome(
            case.workload.name, case.cluster_name, network, emulated, machine, tuple(entries), self._absent
        )

    def _fill(self, done: set[str]) -> list[Entrant]:
        """Builds and warms up autopar, unless it lives already, and as many of the others as memory holds."""
        self.ranks.start()
        group: list[Entrant] = []
        for entrant in self._entrants:
            if entrant.key in done and not entrant.ours:
                continue
            free = available_bytes()
            full = free is not None and free < RESERVE_BYTES + MEMORY_MARGIN * self._need_bytes
            if full and any(not e.ours for e in group):
                self._say(f"memory is full with {len(group)} systems; the others come after them")
                break
            if entrant.key not in self._alive:
                self._start(entrant)
                left = available_bytes()
                if free is not None and left is not None:
                    self._need_bytes = max(self._need_bytes, free - left)
            group.append(entrant)
        return group

    def _start(self, entrant: Entrant) -> None:
        start = time.monotonic()
        system = self.ranks.build(entrant.key, entrant.peer, self.case.workload.name, entrant.options)
        block = self._turns.warm_up([system], max(peer.warm_up_steps for _, peer in entrant.names))[0]
        self._alive[entrant.key] = system
        entrant.losses.update(enumerate(block.losses, block.first))
        entrant.warm_step_s = block.step_s[-1]
        names = " = ".join(name for name, _ in entrant.names)
        self._say(f"{names}: up in {time.monotonic() - start:.1f} s, {block.step_s[-1] * 1e3:.0f} ms a step")

    def _take_rounds(self, group: Sequence[Entrant]) -> None:
        by_key = {e.key: e for e in group}
        start = time.monotonic()
        for i in range(self.effort.rounds):
            if i >= MIN_ROUNDS and time.monotonic() - start > self.effort.rounds_s:
                break
            taking = group if i < self.effort.slow_rounds else _fast_ones(group)
            number = next(self._rounds)
            blocks = [(self._alive[e.key], self._block_steps(e)) for e in taking]
            for block in self._turns.round(blocks, untimed=int(self.case.late_parameters)):
                by_key[block.system].blocks[number] = block
                by_key[block.system].losses.update(enumerate(block.losses, block.first))
            self._say(f"round {i + 1} of {len(taking)} systems: {time.monotonic() - start:.0f} s")

    def _catch_up(self, group: Sequence[Entrant]) -> None:
        """The reference of the losses takes as many steps as the one that took most, so that they are compared."""
        behind = [e for e in group if any(name == REFERENCE for name, _ in e.names)]
        missing = min(COMPARED_STEPS, max(len(e.losses) for e in group)) - sum(len(e.losses) for e in behind)
        if behind and missing > 0:
            block = self._turns.warm_up([self._alive[behind[0].key]], missing)[0]
            behind[0].losses.update(enumerate(block.losses, block.first))

    def _block_steps(self, entrant: Entrant) -> int:
        return max(1, min(self.effort.block_steps, round(self.effort.block_s / entrant.warm_step_s)))

    def _strike_out(self, failure: SystemFailed) -> None:
        """Goes on without the system that failed. The ranks are gone, so the others of its group start again."""
        reason = first_line(failure)
        failed = [e for e in self._entrants if e.key == failure.key]
        if not failed:
            raise failure  # the ranks themselves
        for entrant in failed:
            self._entrants.remove(entrant)
            self._absent |= dict.fromkeys((name for name, _ in entrant.names), f"failed: {reason}")
        self._say(f"{failure.key} failed: {reason}")
        self._alive.clear()
        self._turns = Turns(self._progress)


def available_bytes() -> int | None:
    """Memory that processes can still take; None where this is not Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _fast_ones(group: Sequence[Entrant]) -> list[Entrant]:
    fastest: dict[str, float] = {}
    for e in group:
        for _, peer in e.names:
            fastest[peer.fidelity] = min(e.warm_step_s, fastest.get(peer.fidelity, e.warm_step_s))
    return [e for e in group if e.ours or any(e.warm_step_s < SLOW * fastest[p.fidelity] for _, p in e.names)]
