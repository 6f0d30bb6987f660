"""What is left of a process that had a lab: found by names, marks and command lines, not by the code under test."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0


def namespaces(pid: int) -> list[str]:
    """The namespaces of a process's labs."""
    with suppress(FileNotFoundError):
        return [name for name in os.listdir("/run/netns") if name.startswith(f"autopar-{pid}-")]  # noqa: PTH208
    return []


def processes(pid: int) -> list[str]:
    """The command lines of the processes that a process started in its labs, and of its watchdog."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = folder.joinpath("environ").read_bytes().split(b"\0")
        except OSError:
            continue
        marks = [entry for entry in environment if entry.startswith(b"AUTOPAR_LAB_MARKS=")]
        marked = any(re.search(rb"[=,]%d:" % pid, mark) for mark in marks)
        if marked or re.search(rf"(?s)watch_over.* {pid} {pid}:", command):
            found.append(f"{folder.name}: {command}")
    return found


def bridges() -> list[str]:
    """The bridges of the machine itself."""
    shown = subprocess.run(["ip", "-o", "link", "show", "type", "bridge"], capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


def await_true(condition: Callable[[], object], what: str) -> None:
    """Waits until a condition holds; fails where it does not in good time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def await_nothing_left(pid: int) -> None:
    """Waits until nothing is left of the labs of a process; fails with what there is where it stays."""
    deadline = time.monotonic() + PATIENCE_S
    while left := namespaces(pid) + processes(pid):
        assert time.monotonic() < deadline, f"left of process {pid}: {left}"
        time.sleep(0.02)


def environment() -> dict[str, str]:
    """For an owner: no marks of this process, which may itself run in a lab; aborted, it says where it stood."""
    inherited = {name: value for name, value in os.environ.items() if name != "AUTOPAR_LAB_MARKS"}
    return {**inherited, "PYTHONFAULTHANDLER": "1"}
