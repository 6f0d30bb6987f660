"""Runs cases in worker processes, as many at a time as there are jobs, and shrinks what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.found import Found
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.outcome import Outcome
from benchmarks.fuzz.rank import work
from benchmarks.fuzz.report import Tally
from benchmarks.fuzz.shrink import shrink
from benchmarks.fuzz.workers import Team, Told, answers

PATIENT = 8.0
"""How many times as long as otherwise a case may take that is tried again."""


class Hunt:
    """Teams of workers; a context manager, which ends them."""

    def __init__(self, jobs: int, tally: Tally, target: Callable[..., None] = work) -> None:
        self._alone = [Team(1, target) for _ in range(jobs)]
        self._together = {n: Team(n, target) for n in (2, 3)}
        self._tally, self._target = tally, target

    def __enter__(self) -> Hunt:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        for team in [*self._alone, *self._together.values()]:
            team.stop()

    def run(self, names: Iterable[str], end: float = float("inf")) -> None:
        """Runs cases by their names, until there are no more, it is `end` by the monotonic clock, or the tally has what
        is looked for; those with several ranks one at a time, each world size in batches, so that few processes are
        awake. What may only have been too slow is run once more, with patience."""
        waiting: dict[int, list[str]] = {1: [], 2: [], 3: []}
        coming = iter(names)
        dry = False
        while True:
            for team in [*self._alone, *self._together.values()]:
                if team.name or time.monotonic() > end or self._tally.over:
                    continue
                if team.world_size > 1 and any(t.name for t in self._together.values()):
                    continue
                while not waiting[team.world_size] and not dry and len(waiting[1]) + len(waiting[2]) < 60:
                    name = next(coming, None)
                    dry = name is None
                    if name is not None:
                        waiting[_ranks(name)].append(name)
                if waiting[team.world_size]:
                    team.begin(waiting[team.world_size].pop(0))
            busy = [t for t in [*self._alone, *self._together.values()] if t.name]
            if not busy:
                return
            for team, told in answers(busy):
                self._tally.add(self._patiently(team, told) if told.outcome.may_be_slow else told)

    def _patiently(self, team: Team, told: Told) -> Told:
        """What becomes of a case with new processes and long deadlines: a fault shows again, a loaded machine does
        not."""
        patient = Team(team.world_size, self._target, patience=PATIENT)
        try:
            patient.begin(told.name, told.case)
            while True:
                for _, again in answers([patient]):
                    return again
        finally:
            patient.stop()

    def small(self, found: Found, seconds: float) -> Found:
        """The finding, shrunk."""
        team = self._alone[0] if found.case.world_size == 1 else self._together[found.case.world_size]

        def attempt(case: Case) -> Outcome:
            team.begin(case.name, case)
            while True:
                for _, told in answers([team]):
                    return told.outcome

        again = attempt(found.case)
        if not again.is_finding:
            return Found(found.name, found.case, Outcome(found.outcome.kind, found.outcome.said + " (not again)"))
        case = shrink(found.case, again, attempt, seconds)
        return Found(found.name, case, attempt(case))


def _ranks(name: str) -> int:
    return generate(name).world_size if name.partition("/")[2].startswith("p") else 1
