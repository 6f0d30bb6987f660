"""Ranks of a job that the search has not started itself, or not one by one: under torchrun, or behind a command."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import SpecError
from autopar.lab.host import Host
from autopar.lab.job import GRACE_S, JobFailed, JobTimeout
from autopar.lab.pool import Answers, Limits, Pool
from autopar.runtime.job.meeting import meet
from autopar.trials.attend import Seat, attend
from autopar.trials.board import POLL_S, Beating, Board, FolderBoard, StoreBoard

LAUNCH_S = 900.0
"""How long a command may take until all ranks answer: others may be before it in a queue."""
MEETING_S = 300.0
_LAST_WORDS = 30
_END_S = 10.0
"""How long a launcher may take to end once its ranks have been told to."""


@dataclass(frozen=True)
class Elsewhere:
    """A place of which nothing is known but its number of ranks."""

    note: str
    ranks: tuple[Host, ...] = ()
    servers: tuple[Host, ...] = ()
    emulated: bool = False


@dataclass
class Asking:
    """The search's end of a board: asks all ranks at once, of one start after the other."""

    board: Board
    world_size: int
    is_gone: Callable[[], str] = lambda: ""
    """Says why no rank will answer any more; empty as long as they may."""
    number: int = 0
    starts: int = 0

    def start(self, timeout_s: float) -> Started:
        self.starts += 1
        return Started(self, self.starts, timeout_s)


@dataclass
class Started:
    """One start of the ranks; see `autopar.lab.pool.Asked`."""

    asking: Asking
    start: int
    timeout_s: float
    ended: bool = field(default=False)

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Answers:
        """One answer of each rank. Times that ranks tell begin with their own start: hosts have clocks of their own."""
        of, number = self.asking, self.asking.number
        asked = {"start": self.start, "timeout_s": self.timeout_s, "limit_s": timeout_s, "request": dict(request)}
        of.number += 1
        of.board.put(f"ask/{number}", json.dumps(asked))
        answers: dict[int, dict[str, Any]] = {}
        deadline, patience = time.monotonic() + timeout_s, math.inf
        while late := [rank for rank in range(of.world_size) if rank not in answers]:
            for rank in late:
                text = of.board.get(f"answer/{number}/{rank}")
                if text is None:
                    continue
                answers[rank] = json.loads(text)
                if "failed" in answers[rank]:
                    patience = min(patience, time.monotonic() + GRACE_S)
            if time.monotonic() > patience:
                break
            if gone := of.is_gone():
                raise JobFailed(gone)
            if time.monotonic() > deadline:
                raise JobTimeout(f"ranks {late} did not answer within {timeout_s:g} s")
            time.sleep(POLL_S)
        _raise_first(answers)
        return [_own_clock(answers[rank]["answer"]) for rank in range(of.world_size)]

    def __exit__(self, *raised: Any) -> None:
        if not self.ended:
            self.ended = True
            self.asking.board.put(f"stop/{self.start}", "")


def _raise_first(answers: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises for the rank that failed first: those that complain of a lost peer do so after its own last words."""
    failed = {rank: said for rank, said in answers.items() if "failed" in said}
    if failed:
        first = min(failed, key=lambda rank: failed[rank].get("wrote_s", math.inf))
        kind = JobTimeout if failed[first].get("late") else JobFailed
        raise kind(f"rank {first}: {failed[first]['failed']}")


def _own_clock(answer: dict[str, Any]) -> dict[str, Any]:
    if "start_s" not in answer:
        return answer
    start_s = answer["start_s"]
    return {**answer, "start_s": 0.0, "ends_s": [end_s - start_s for end_s in answer["ends_s"]]}


@contextlib.contextmanager
def under_torchrun(world_size: int) -> Iterator[Pool]:
    """On rank 0 of a job: its ranks, each of which is to `attend_job`. Raises `SpecError` where there are others than
    the cluster has."""
    seat = Seat.of(os.environ)
    if seat.world_size != world_size:
        raise SpecError(f"the cluster has {world_size} ranks, torchrun has started {seat.world_size}: start as many")
    board = StoreBoard(meet(MEETING_S).store)
    with contextlib.ExitStack() as stack:
        own = threading.Thread(target=attend, args=(board, seat), name="autopar-attend", daemon=True)
        stack.callback(own.join, _END_S)
        stack.enter_context(Beating(board))
        own.start()
        yield stack.enter_context(
            Pool(Elsewhere("ranks of a job"), Limits(MEETING_S), start=Asking(board, world_size).start)
        )


def attend_job() -> None:
    """On all other ranks of a job: runs what rank 0 asks for, until rank 0's search is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the search, and keeps the best plan so far
    attend(StoreBoard(meet(MEETING_S).store), Seat.of(os.environ))


@contextlib.contextmanager
def launched(prefix: str, folder: Path, world_size: int) -> Iterator[Pool]:
    """Ranks that a command starts, as `srun -N 4 --ntasks-per-node 8`. `folder`: all hosts see it; what the ranks are
    told and say is kept in a folder of its own in it, and removed at the end."""
    words = shlex.split(prefix)
    if not words or shutil.which(words[0]) is None:
        raise SpecError(f"--launch '{prefix}': there is no command '{words[0] if words else ''}'")
    with contextlib.ExitStack() as stack:
        launcher = _Launcher(words, folder, world_size)
        stack.callback(launcher.end)
        yield stack.enter_context(Pool(Elsewhere("ranks of a job"), Limits(LAUNCH_S), start=launcher.start))


class _Launcher:
    """Starts the command, and starts it again where it has ended."""

    def __init__(self, words: Sequence[str], folder: Path, world_size: int) -> None:
        self._words, self._folder, self._world_size = words, folder, world_size
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: Asking | None = None
        self._stack = contextlib.ExitStack()

    def start(self, timeout_s: float) -> Started:
        if self._asking is None or self._is_gone():
            self.end()
            self._asking = self._launch()
        return self._asking.start(timeout_s)

    def end(self) -> None:
        """Ends the command, and removes its folder."""
        self._stack.close()
        self._process, self._asking = None, None

    def _launch(self) -> Asking:
        own = self._folder.resolve() / f"run-{secrets.token_hex(4)}"
        try:
            own.mkdir(parents=True)
            self._stack.callback(shutil.rmtree, own, ignore_errors=True)
            out = self._stack.enter_context((own / "launch.out").open("wb"))
        except OSError as e:
            raise SpecError(f"{own}: cannot be made for the ranks of the trials: {e.strerror or e}") from e
        is_torchrun = Path(self._words[0]).name == "torchrun" or "torch.distributed.run" in self._words
        line = [*self._words, *(["--no-python"] if is_torchrun else [])]
        line += [sys.executable, "-m", "autopar.trials.attend", str(own)]
        # A session of its own: Ctrl-C reaches the search alone, which then ends the ranks.
        self._process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self._out = own / "launch.out"
        self._stack.callback(self._wait)
        board = FolderBoard(own)
        self._stack.enter_context(Beating(board))
        return Asking(board, self._world_size, self._is_gone)

    def _is_gone(self) -> str:
        code = None if self._process is None else self._process.poll()
        if code is None:
            return ""
        last = "\n".join(self._out.read_text(errors="replace").strip().splitlines()[-_LAST_WORDS:])
        return f"`{shlex.join(self._words)}` has ended with exit status {code}:\n{last or '(without a word)'}"

    def _wait(self) -> None:
        assert self._process is not None
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                return
