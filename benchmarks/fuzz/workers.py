"""Worker processes, kept for many cases: single ones, and teams that form a gloo group."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from autopar.runtime.job.ports import held_port
from autopar.verification import start_method
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.outcome import Outcome, merged

START_S, CASE_S = 90.0, 60.0
"""How long a team may take to start, and a case to run."""
_CASES = 250
"""After so many, a team is replaced, as PyTorch's tracing keeps memory."""


@dataclass
class Told:
    """A team's answer about a case."""

    name: str
    outcome: Outcome
    case: Case | None
    """Where it is a finding, or was asked for."""


@dataclass
class Team:
    """As many processes as a case has ranks."""

    world_size: int
    target: Callable[..., None]
    """What each of them runs, given its rank, the world size, a port, its end of a pipe, and `patience`."""
    patience: float = 1.0
    """How many times as long as usual ranks wait for each other, and this process for them."""
    processes: list[Any] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    name: str = ""
    _given: str = ""
    _ready: bool = False
    _done: int = 0
    _answers: dict[int, bytes] = field(default_factory=dict)
    _deadline: float = 0.0
    _port: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        context: Any = multiprocessing.get_context(start_method())
        port = self._port.enter_context(held_port())
        self._ready, self._done = False, 0
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=self.target, args=(rank, self.world_size, port, theirs, self.patience),
                                      daemon=True)  # fmt: skip
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(mine)
        self._answers, self._deadline = {}, time.monotonic() + START_S * self.patience

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()
        self._port.close()
        self.processes, self.connections, self.name = [], [], ""

    def begin(self, name: str, case: Case | None = None, echo: bool = False) -> None:
        """Hands a case over, by its name or as it is."""
        told: dict[str, Any] = {"name": name, "echo": echo} | ({} if case is None else {"case": case.dumps()})
        self.name, self._given = name, json.dumps(told)
        if not self.processes:
            self.start()
        elif self._ready:
            self._send()

    def _send(self) -> None:
        self._answers, self._deadline = {}, time.monotonic() + CASE_S * self.patience
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(self._given.encode())

    def poll(self) -> Told | None:
        """The answer, once all ranks have given theirs or the case has failed; the team is then ready for another."""
        for rank, connection in enumerate(self.connections):
            if rank in self._answers:
                continue
            try:
                if connection.poll():
                    self._answers[rank] = connection.recv_bytes()
            except (EOFError, OSError):
                return self._failed("died", rank)
        if len(self._answers) == self.world_size:
            if not self._ready:
                self._ready = True
                self._send()
                return None
            return self._answered()
        if time.monotonic() > self._deadline:
            missing = next(r for r in range(self.world_size) if r not in self._answers)
            return self._failed("hung", missing)
        return None

    def _answered(self) -> Told:
        answers = [json.loads(self._answers[r]) for r in range(self.world_size)]
        texts = [a.pop("case", None) for a in answers]
        outcomes = [Outcome(**a) for a in answers]
        outcome, name = merged(outcomes), self.name
        text = next((t for t in texts if t is not None), None)
        self.name, self._done = "", self._done + 1
        kinds = {(o.kind, o.reason) for o in outcomes}
        apart = self.world_size > 1 and (outcome.kind == "crashed" or len(kinds) > 1)
        if apart or self._done >= _CASES:
            self.stop()
        return Told(name, outcome, None if text is None else Case.loads(text))

    def _failed(self, kind: Any, rank: int) -> Told:
        process = self.processes[rank]
        process.join(1.0)
        end = (
            f"with exit code {process.exitcode}"
            if kind == "died"
            else f"did not answer within {CASE_S * self.patience:g} s"
        )
        found = [Outcome(**{k: v for k, v in json.loads(a).items() if k != "case"}) for a in self._answers.values()
                 if a != b"ready"]  # fmt: skip
        said = "; others: " + "; ".join(o.said for o in found) if found else ""
        name, given = self.name, json.loads(self._given)
        self.stop()
        case = Case.loads(given["case"]) if "case" in given else None
        return Told(name, Outcome(kind, f"rank {rank} {end}{said}"), case)


def answers(teams: list[Team]) -> Iterator[tuple[Team, Told]]:
    """Waits until a team answers, or a moment; yields those that do."""
    wait([c for t in teams for r, c in enumerate(t.connections) if r not in t._answers], timeout=0.25)
    for team in teams:
        if team.name and team.processes:
            told = team.poll()
            if told is not None:
                yield team, told
