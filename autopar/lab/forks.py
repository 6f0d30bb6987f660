"""A job's ranks, forked from processes that have imported what they run (`autopar.lab.template`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Module:
    """A Python module whose `main`, without arguments, ranks call; `sys.argv` is as under `python -m`."""

    name: str
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """The command that runs it in a process of its own."""
        return [sys.executable, "-m", self.name, *self.args]


@dataclass(frozen=True, slots=True)
class Fork:
    """What a rank has of its own."""

    environment: dict[str, str]
    namespace: str | None
    """The network namespace that it enters; `None` for none."""
    cores: tuple[int, ...]
    """The machine's cores that it runs on; empty: on any."""
    stdin: int
    """A file descriptor of the template's."""
    answers: int
    """Likewise; the rank inherits it under its number."""
    stdout: str
    """The file that it writes to."""
    stderr: str


def can_fork() -> bool:
    """Whether ranks are forked here: elsewhere than on Linux, what PyTorch has imported may not survive it."""
    return sys.platform == "linux"


@dataclass(eq=False)
class ForkedRank:
    """A rank, as `subprocess.Popen` shows a process."""

    template: Template
    stdin: IO[str]
    pid: int | None = None
    """`None` before it was forked."""
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; `None` where it still runs."""
        self.template.listen()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The same, once it has ended; raises `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            time.sleep(_POLL_S)
        return status

    def signal(self, number: int) -> None:
        """Sends a signal to it and what it has started; before it was forked, to the template."""
        self.template.listen()
        with suppress(ProcessLookupError):
            os.killpg(self.template.process.pid if self.pid is None else self.pid, number)


@dataclass(eq=False)
class Template:
    """The process that ranks are forked from."""

    process: subprocess.Popen[bytes]
    err: Path
    """The file that it writes to itself, as where it cannot import the module."""
    ranks: list[ForkedRank] = field(default_factory=list)
    _said: bytes = b""

    @classmethod
    def start(
        cls, module: Module, forks: Sequence[Fork], stdins: Sequence[IO[str]], environment: Mapping[str, str], err: Path
    ) -> Template:
        """Starts it; returns at once. `stdins`: where what each rank reads is written."""
        with err.open("a") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "autopar.lab.template", module.name, *module.args],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=[fd for fork in forks for fd in (fork.stdin, fork.answers)],
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([asdict(fork) for fork in forks]).encode() + b"\n")
            process.stdin.close()
        made = cls(process, err)
        made.ranks = [ForkedRank(made, stdin) for stdin in stdins]
        return made

    def listen(self) -> None:
        """Notes what it has said meanwhile. Where it is gone, so are the ranks that it has not spoken of."""
        pipe = self.process.stdout
        assert pipe is not None
        gone = self.process.poll()  # first: what it says, it says before it ends
        while not pipe.closed and (chunk := pipe.read()):
            self._said += chunk
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            said = json.loads(line)
            rank = self.ranks[said["rank"]]
            rank.pid, rank.returncode = said.get("pid", rank.pid), said.get("exit_status", rank.returncode)
        if gone is not None:
            for rank in self.ranks:
                rank.returncode = (gone or 1) if rank.returncode is None else rank.returncode

    def end(self, timeout_s: float) -> None:
        """Kills it; the ranks are not its concern."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=timeout_s)
        self.listen()
        assert self.process.stdout is not None
        self.process.stdout.close()
