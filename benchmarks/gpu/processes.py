"""Processes of a benchmark that may fail or hang: each in a session of its own, which is ended as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

FAREWELL_S = 5.0


def run(argv: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str] | None = None) -> str | None:
    """Runs a command, its output in the file `log`; returns why it failed in one sentence, or None where it did not."""
    return run_all([argv], [log], timeout_s, [environment or {}])


def run_all(
    commands: Sequence[Sequence[str]],
    logs: Sequence[Path],
    timeout_s: float,
    environments: Sequence[Mapping[str, str]],
) -> str | None:
    """The same of commands that run at the same time. Once one fails, the others are ended: they would wait for it."""
    end = time.monotonic() + timeout_s
    running = [_start(*each) for each in zip(commands, logs, environments, strict=True)]
    try:
        while True:
            codes = [process.poll() for process in running]
            failed = next((i for i, code in enumerate(codes) if code), None)
            if failed is not None:
                if len(running) > 1:  # the others may be about to say whose fault it is
                    time.sleep(1.0)
                return f"exit code {codes[failed]}: {last_words(logs[failed])}"
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() > end:
                return f"not done after {timeout_s:.0f} s; the last line was: {last_words(logs[0])}"
            time.sleep(0.1)
    finally:
        for process in running:
            _end(process)


def python(module: str, *arguments: str) -> list[str]:
    """The command line of one of the repository's modules, in this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def last_words(log: Path) -> str:
    """The last line of a log that says something, shortened."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    words = [line.strip() for line in lines if line.strip() and not line.startswith(("[W", "  warnings.warn"))]
    return words[-1][:400] if words else "no message"


def _start(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started, as compilers' workers are."""
    for number, patience_s in ((signal.SIGTERM, FAREWELL_S), (signal.SIGKILL, FAREWELL_S)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            if number == signal.SIGKILL:
                return
