"""The ranks, seen from the parent: systems are built in them, run, and dropped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from autopar.lab import Host, Job, JobFailed, JobTimeout
from benchmarks.interleaved import START_TIMEOUT_S, Answer, System
from benchmarks.peers.base import Options, Peer

_WORKER = (sys.executable, "-m", "benchmarks.peers.worker")
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


class SystemFailed(RuntimeError):
    """A system could not be built, or not run; nothing that lived in the ranks can be used any more."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


class Ranks:
    """Living ranks, one on each of `hosts`. A context manager."""

    def __init__(self, hosts: Sequence[Host], servers: Sequence[Host] = ()) -> None:
        self.hosts, self.servers = tuple(hosts), tuple(servers)
        self._stack = ExitStack()
        self._job: Job | None = None

    def __enter__(self) -> Self:
        self._launch()  # they import while the parent captures and plans
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the ranks, and with them every system. The next request starts new ones."""
        self._stack.close()
        self._job = None

    def start(self) -> None:
        """Waits until the ranks are up; starts them, unless they live. Every other request does so, too."""
        self._ask("ranks", {"do": "nothing"}, START_TIMEOUT_S)

    def build(self, key: str, peer: Peer, workload: str, options: Options) -> System:
        """Builds a system under a name of its own."""
        request = {"do": "build", "key": key, "peer": peer.name, "workload": workload, "options": options}
        self._ask(key, request, START_TIMEOUT_S)
        return System(key, self.hosts, lambda *steps: self._run(key, *steps), peer.period)

    def drop(self, key: str) -> None:
        """Frees what a system holds."""
        self._ask(key, {"do": "drop", "key": key}, START_TIMEOUT_S)

    def _run(self, key: str, first: int, count: int, timeout_s: float) -> Sequence[Answer]:
        return self._ask(key, {"do": "run", "key": key, "first": first, "count": count}, timeout_s)

    def _ask(self, key: str, request: dict[str, Any], timeout_s: float) -> Sequence[Answer]:
        try:
            answers = self._launch().ask(request, timeout_s)
        except (JobFailed, JobTimeout) as e:
            self.stop()
            raise SystemFailed(key, str(e)) from e
        errors = [a["error"] for a in answers if "error" in a]
        if errors:
            self.stop()
            raise SystemFailed(key, errors[0])
        return answers

    def _launch(self) -> Job:
        if self._job is None:
            self._job = self._stack.enter_context(Job(self.hosts, _WORKER, _ENVIRONMENT, self.servers))
        return self._job
