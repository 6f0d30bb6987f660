"""A job: one process per rank on given hosts, with the environment that torchrun would set.

`launch` runs a job to its end. A `Job` that stays up answers requests: the parent asks all ranks at once and reads one
answer of each; in the rank's process, `serve` is the other end. Requests and answers are lines of JSON on pipes of
their own, so a rank may print what it likes.

All ranks, and what they have started, are killed as soon as one of them fails, when the time is over, and at the end
of the `with` block; by the watchdog, where the parent is killed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NoReturn, Self

from autopar.lab import guard
from autopar.lab.forks import Fork, ForkedRank, Module, Template, can_fork
from autopar.lab.host import Host
from autopar.lab.processes import above_streams, kill_all

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_FD = "AUTOPAR_LAB_ANSWER_FD"
_POLL_S = 0.02
GRACE_S = 2.0
"""How long to wait, once a rank has failed, for the one that may have caused it: ranks end slower than sockets."""
_REAP_S = 5.0
"""How long to wait for the exit status of a process that was killed."""
TEMPLATES = 2
"""From so many processes ranks are forked, in turn. Those of one have Python's hash seed in common, and so the order of
their sets; where all had it, they would never disagree about an order that they take from one."""
_ports = itertools.count(29500)


class JobFailed(RuntimeError):
    """A rank ended with an error; the message ends with what it wrote to stderr."""

    def __init__(
        self, message: str, rank: int | None = None, exit_status: int | None = None, wrote_s: float = math.inf
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; None where all ended well, but one without an answer."""
        self.exit_status = exit_status
        """Negative for a signal."""
        self.wrote_s = wrote_s
        """When that rank last wrote to stderr, in seconds since the epoch: whoever lost it as a peer did so later."""


class JobTimeout(RuntimeError):
    """The job did not end, or did not answer, in time; the message names the ranks that are late."""


class Job:
    """One process per rank; `hosts[r]` is where rank r runs. A context manager. On each of `servers` runs
    `autopar serve`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        runs: Sequence[str] | Module,
        env: Mapping[str, str] | None = None,
        servers: Sequence[Host] = (),
    ) -> None:
        """`runs`: what every rank runs: a command, or a module, which is imported once or twice, in processes that
        ranks are forked from."""
        if not hosts:
            raise ValueError("a job needs at least one rank")
        self.hosts = tuple(hosts)
        self.runs = runs if isinstance(runs, Module) and can_fork() else _command(runs)
        self.env = dict(env or {})
        self.servers = tuple(servers)
        self.serving: list[subprocess.Popen[str]] = []
        """The servers' processes."""
        self._mark = guard.new_mark()
        self._ranks: list[subprocess.Popen[str] | ForkedRank] = []
        self._templates: list[Template] = []
        self._answers: list[IO[bytes]] = []
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autopar-job-")))
            stack.callback(self.kill)
            port = _port(self.hosts[0])
            if isinstance(self.runs, Module):
                self._fork_all(self.runs, port, stack)
            else:
                for rank in range(len(self.hosts)):
                    self._start(rank, self.runs, port, stack)
            for server in self.servers:
                self._start_server(server, port, stack)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def wait(self, timeout_s: float, meanwhile: Callable[[], object] | None = None) -> list[str]:
        """Waits until every rank has ended; returns what each wrote to stdout. There are no more requests: `serve`
        returns. `meanwhile` is called again and again, and last when the ranks have ended, or one has failed."""
        for rank in range(len(self._ranks)):
            self._close_stdin(rank)
        try:
            self._wait(timeout_s, meanwhile or (lambda: None))
        finally:
            if meanwhile is not None:
                meanwhile()
        return [self.output(rank).read_text(errors="replace") for rank in range(len(self.hosts))]

    def _wait(self, timeout_s: float, meanwhile: Callable[[], object]) -> None:
        deadline = time.monotonic() + timeout_s
        while any(code is None for code in self._poll()):
            meanwhile()
            if time.monotonic() > deadline:
                self._give_up([r for r, p in enumerate(self._ranks) if p.returncode is None], timeout_s)
            time.sleep(_POLL_S)

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Sends one request to every rank; returns the answer of each, in rank order."""
        for process in self._ranks:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # The rank is dead: polled for below.
                process.stdin.write(json.dumps(dict(request)) + "\n")
                process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        lines: dict[int, bytes] = dict.fromkeys(range(len(self._ranks)), b"")
        with selectors.DefaultSelector() as open_pipes:
            for rank, pipe in enumerate(self._answers):
                open_pipes.register(pipe, selectors.EVENT_READ, rank)
            while late := [r for r, line in lines.items() if not line.endswith(b"\n")]:
                for key, _ in open_pipes.select(timeout=_POLL_S):
                    chunk = os.read(key.fd, 1 << 16)
                    lines[key.data] += chunk
                    if not chunk or chunk.endswith(b"\n"):
                        open_pipes.unregister(key.fileobj)
                codes = self._poll()
                gone = [r for r in late if codes[r] == 0 and self._answers[r] not in open_pipes.get_map()]
                gone = [r for r in gone if not lines[r].endswith(b"\n")]
                if gone:
                    raise JobFailed(f"ranks {gone} ended without an answer to {dict(request)}")
                if time.monotonic() > deadline:
                    self._give_up(late, timeout_s)
        return [json.loads(line) for line in lines.values()]

    def kill(self) -> None:
        """Ends every rank, and what it has started, at once."""
        for process in (*self._ranks, *self.serving):
            _signal(process, signal.SIGKILL)
            # Not without end: an interrupt in the midst of `poll` leaves subprocess's own lock taken for good.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_REAP_S)
        for template in self._templates:
            template.end(_REAP_S)
        for rank in range(len(self._ranks)):
            self._close_stdin(rank)
        # What has left the rank's process group, or was started just before an interrupt.
        kill_all(lambda pid: guard.carries(self._mark, pid))

    def output(self, rank: int, stream: Literal["stdout", "stderr"] = "stdout") -> Path:
        """The file that a rank's output goes to; it is there as long as the job is."""
        return self._folder / f"{rank}.{stream}"

    def _close_stdin(self, rank: int) -> None:
        pipe = self._ranks[rank].stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # There was more to say, and nobody listens.
            pipe.close()

    def _start(self, rank: int, argv: Sequence[str], port: int, stack: ExitStack) -> None:
        out = stack.enter_context(self.output(rank).open("w"))
        err = stack.enter_context(self.output(rank, "stderr").open("w"))
        write_fd = self._answer_pipe(stack)
        env = self._environment_of(rank, port) | {_ANSWER_FD: str(write_fd), **self.env}
        try:
            # A session of its own: Ctrl-C reaches the parent alone, which then ends the ranks with all they started.
            process = self.hosts[rank].popen(
                argv,
                env,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        self._ranks.append(process)

    def _fork_all(self, module: Module, port: int, stack: ExitStack) -> None:
        guard.watch()
        environment = {**guard.marked_environment(), **self._environment(), **self.env}
        forks, stdins = list[Fork](), list[IO[str]]()
        with ExitStack() as given:  # to the templates, and of no use here
            for rank, host in enumerate(self.hosts):
                files = self.output(rank), self.output(rank, "stderr")
                for file in files:
                    file.touch()
                read_fd, write_fd = _pipe()
                stdins.append(os.fdopen(write_fd, "w"))
                answers = self._answer_pipe(stack)
                for fd in (read_fd, answers):
                    given.callback(os.close, fd)
                own = {**self._environment_of(rank, port), **host.bound, _ANSWER_FD: str(answers), **self.env}
                forks.append(Fork(own, host.namespace, host.cores, read_fd, answers, *map(str, files)))
            for i in range(min(TEMPLATES, len(forks))):
                err = self._folder / f"template-{i}.stderr"
                ranks = slice(i, None, TEMPLATES)
                self._templates.append(Template.start(module, forks[ranks], stdins[ranks], environment, err))
        turns = [iter(template.ranks) for template in self._templates]
        self._ranks += [next(turns[rank % TEMPLATES]) for rank in range(len(forks))]

    def _answer_pipe(self, stack: ExitStack) -> int:
        """A pipe for what the next rank answers: the file descriptor that it writes to."""
        read_fd, write_fd = _pipe()
        self._answers.append(stack.enter_context(os.fdopen(read_fd, "rb")))
        return write_fd

    def _environment_of(self, rank: int, port: int) -> dict[str, str]:
        host = self.hosts[rank]
        distinct = list(dict.fromkeys(self.hosts))
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": str(self.hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(self.hosts.count(host)),
            "GROUP_RANK": str(distinct.index(host)),
            "GROUP_WORLD_SIZE": str(len(distinct)),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            **self._environment(),
        }

    def _start_server(self, host: Host, port: int, stack: ExitStack) -> None:
        out = stack.enter_context((self._folder / f"{host.name}.out").open("w"))
        argv = [sys.executable, "-m", "autopar", "serve", f"{self.hosts[0].address}:{port}", "--name", host.name]
        env = {**self._environment(), **self.env}
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        self.serving.append(host.popen(argv, env, start_new_session=True, **streams))

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            guard.MARK: guard.marked_environment(self._mark)[guard.MARK],
        }

    def _poll(self) -> list[int | None]:
        codes = [process.poll() for process in self._ranks]
        if any(codes):
            self._blame()
        return codes

    def _blame(self) -> NoReturn:
        """Ends all ranks, and raises `JobFailed` for the one that failed first."""
        patience = time.monotonic() + GRACE_S
        while time.monotonic() < patience and any(process.poll() is None for process in self._ranks):
            time.sleep(_POLL_S)
        codes = [process.poll() for process in self._ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        self.kill()
        # Those that complain of a lost peer do so after the peer's own last words.
        wrote_s = {rank: self.output(rank, "stderr").stat().st_mtime for rank in failed}
        first = min(failed, key=lambda rank: wrote_s[rank])
        others = [rank for rank in failed if rank != first]
        raise JobFailed(
            f"rank {first}{f' (and ranks {others})' if others else ''} ended with exit status {codes[first]}:\n"
            f"{self._stderr(first)}",
            first,
            codes[first],
            wrote_s[first],
        )

    def _give_up(self, late: list[int], timeout_s: float) -> None:
        for rank in late:  # With its fault handler on, Python writes where each thread is, and ends.
            _signal(self._ranks[rank], signal.SIGABRT)
        for rank in late:
            with suppress(subprocess.TimeoutExpired):
                self._ranks[rank].wait(timeout=5)
        self.kill()
        raise JobTimeout(f"ranks {late} were not done after {timeout_s:g} s; rank {late[0]}:\n{self._stderr(late[0])}")

    def _stderr(self, rank: int) -> str:
        """The last 40 lines that a rank has written there."""
        text, process = self.output(rank, "stderr").read_text(errors="replace").strip(), self._ranks[rank]
        if not text and isinstance(process, ForkedRank):
            text = process.template.err.read_text(errors="replace").strip()
        return "\n".join(text.splitlines()[-40:]) or "(nothing on stderr)"


def launch(
    hosts: Sequence[Host], runs: Sequence[str] | Module, *, env: Mapping[str, str] | None = None, timeout_s: float
) -> list[str]:
    """Runs a command or a module once on each of `hosts`, as ranks 0, 1, ...; returns what each wrote to stdout.

    Raises `JobFailed` with the first failing rank's stderr, or `JobTimeout`; no process is left in either case.
    """
    with Job(hosts, runs, env) as job:
        return job.wait(timeout_s)


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """In a rank's process: answers the requests of `Job.ask`, until the parent is gone."""
    with os.fdopen(int(os.environ[_ANSWER_FD]), "w") as pipe:
        for line in sys.stdin:
            pipe.write(json.dumps(dict(answer(json.loads(line)))) + "\n")
            pipe.flush()


def _command(runs: Sequence[str] | Module) -> Sequence[str]:
    return runs.argv if isinstance(runs, Module) else tuple(runs)


def _pipe() -> tuple[int, int]:
    read_fd, write_fd = map(above_streams, os.pipe())
    return read_fd, write_fd


def _signal(process: subprocess.Popen[str] | ForkedRank, number: int) -> None:
    """Sends a signal to a process and what it has started."""
    if isinstance(process, ForkedRank):
        return process.signal(number)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _port(host: Host) -> int:
    """A free port on `host`. In a namespace that this process made, whatever it has not handed out before."""
    if host.namespace is not None:
        return next(_ports)
    with socket.socket() as probe:
        probe.bind((host.address, 0))
        return int(probe.getsockname()[1])
