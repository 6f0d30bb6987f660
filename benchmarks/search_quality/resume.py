"""Searches that are killed at random moments and resumed: they must end as the one that was left alone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Report, Target
from benchmarks.search_quality.part import Asked, Figures, Kept

KILLS = 20
TIMEOUT_S = 300.0
PAUSE_S = 0.002


def run(report: Report, kept: Kept, asked: Asked) -> None:
    """One row: how many of the killed searches ended the same."""
    figures = kept.of("resume/kills", measured)
    report.data["resume"] = figures
    left = figures["left"]
    said = f"{figures['same']} of {len(left)} end the same, with {min(left)} to {max(left)} plans recorded at the kill"
    report.rows.append(("resume", figures["about"], said, f"{figures['priced']} plans, not killed", ""))
    report.targets.append(Target("resume: killed searches that end the same", figures["same"], KILLS, "at least"))
    report.notes.append(
        "resume: each search is a process that is killed (SIGKILL) at a random moment after its first plan, and "
        "another process that resumes it; the plan, and every plan that was priced with its price, must be the same."
    )


def measured() -> Figures:
    """Kills searches and resumes them, each in a folder of its own."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="autopar-resume-") as folder:
        whole = _finished(Path(folder) / "whole.jsonl")
        left: list[int] = []
        same = 0
        while len(left) < KILLS:
            journal = Path(folder) / f"{len(left)}.jsonl"
            if not _killed(journal, draw.random() * whole["search_s"]):
                journal.unlink()  # it had ended by then
                continue
            left.append(journal.read_bytes().count(b"\n") - 1)
            same += _finished(journal)["outcome"] == whole["outcome"]
    return {"about": whole["about"], "priced": whole["priced"], "same": same, "left": left}


def _started(journal: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "benchmarks.search_quality.resume_worker", str(journal)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def _finished(journal: Path) -> Figures:
    """What a search says at its end that takes from the journal what is there."""
    worker = _started(journal)
    said, _ = worker.communicate(timeout=TIMEOUT_S)
    if worker.returncode:
        raise RuntimeError(f"the search ended with exit code {worker.returncode}")
    found: Figures = json.loads(said.splitlines()[-1])
    return found


def _killed(journal: Path, after_s: float) -> bool:
    """Begins a search and kills it so many seconds after its first plan; whether it was still searching."""
    worker = _started(journal)
    deadline = time.monotonic() + TIMEOUT_S
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        if worker.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the search wrote no plan into its journal; exit code {worker.poll()}")
        time.sleep(PAUSE_S)
    time.sleep(after_s)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    return worker.returncode == -signal.SIGKILL
