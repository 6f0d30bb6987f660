"""Two processes that are ranks of one job, and try models one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

from autopar.runtime.job.ports import held_port
from benchmarks.capture.outcome import Outcome, merged

WORLD_SIZE = 2
MODEL_S = 300.0
"""How long a model may take with all its runs."""
_MODELS = 25
"""After so many, the processes are replaced: libraries and PyTorch's tracing keep memory."""


@dataclass
class Team:
    """Its processes are started for the first model, and again behind one that has not ended well."""

    _ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    _errors: list[IO[str]] = field(default_factory=list)
    _done: int = 0
    _port: ExitStack = field(default_factory=ExitStack)

    def attempt(self, name: str) -> Outcome:
        """What becomes of a model."""
        if not self._ranks:
            self._start()
        said: list[str] = [""] * WORLD_SIZE

        def read(rank: int) -> None:
            pipe = self._ranks[rank].stdout
            assert pipe is not None
            said[rank] = pipe.readline()
            if not said[rank]:
                self._kill()  # the others would wait for it

        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(name + "\n")
            process.stdin.flush()
        timer = threading.Timer(MODEL_S, self._kill)
        timer.start()
        self._together(read)
        late = timer.finished.is_set()
        timer.cancel()
        if all(said):
            outcome = merged([Outcome.of(json.loads(line)) for line in said])
        else:
            outcome = Outcome(name, failure=f"not done after {MODEL_S:.0f} s" if late else self._last_words())
        self._done += 1
        if not all(said) or outcome.kind == "crashed" or self._done >= _MODELS:
            self.stop()
        return outcome

    def stop(self) -> None:
        """Ends the processes."""
        self._kill()
        for process in self._ranks:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for file in self._errors:
            file.close()
        self._ranks, self._errors, self._done = [], [], 0
        self._port.close()

    def _start(self) -> None:
        port = self._port.enter_context(held_port())
        for rank in range(WORLD_SIZE):
            env = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE),
                "LOCAL_WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            self._errors.append(errors := tempfile.TemporaryFile("w+"))  # noqa: SIM115, `stop` closes it
            argv = [sys.executable, "-m", "benchmarks.capture.rank"]
            self._ranks.append(subprocess.Popen(argv, env=env, text=True, stdin=subprocess.PIPE,
                                                stdout=subprocess.PIPE, stderr=errors))  # fmt: skip

    def _kill(self) -> None:
        for process in self._ranks:
            process.kill()

    def _together(self, read: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(WORLD_SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _last_words(self) -> str:
        """Of the process that has ended by itself."""
        for rank, process in enumerate(self._ranks):
            code = process.wait()
            if code != -9:
                self._errors[rank].seek(0)
                last = (self._errors[rank].read().strip().splitlines() or ["no message"])[-1]
                return f"rank {rank} ended with exit code {code}: {last}"
        return "a rank was killed"
