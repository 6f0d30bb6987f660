"""`benchmarks.gpu` where there is no device: what it says, and how its parts are run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.processes import run, run_all
from benchmarks.harness import Report


def test_it_says_that_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(command.main, ["--check"])
    assert result.output.startswith("There is no CUDA device here: torch ")
    assert "Nothing was measured" in result.output
    assert result.exit_code == 1, "nothing was checked"


def test_limits_of_the_parts_that_always_run_leave_time_for_one_model() -> None:
    first = [command.PARTS[name] for name in ("nccl", "ranks", "memory", "calibration", "step resnet-50")]
    assert sum(first) <= command.BUDGET_S < 9 * 60


def test_a_part_that_fails_says_why_and_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(name: str, folder: Path, where: str, seconds: float) -> tuple[Findings, str | None]:
        found = Findings(tmp_path / name)
        found.row("a row", "found")
        found.target("a figure", 1.0, 2.0)
        return found, "exit code 1: CUDA error" if name == "nccl" else None

    monkeypatch.setattr(command, "measure", measure)
    report = Report("gpu", "title", ("part", "what", "found"))
    command.fill(report, ("nccl", "memory"), "cuda")
    assert report.rows == [
        ("nccl", "a row", "found"),
        ("nccl", "the part failed", "exit code 1: CUDA error"),
        ("memory", "a row", "found"),
    ]
    assert [t.name for t in report.short] == ["nccl: has run"]


def test_what_was_found_before_a_part_was_ended_is_there(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "part.json", data={"a": [1.5]})
    findings.row("what", "found")
    findings.target("name", None, 1.0, unit="s")
    assert Findings.load(tmp_path / "part.json") == findings
    assert Findings.load(tmp_path / "nothing.json").rows == []


def test_a_process_that_fails_gives_its_last_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('first'); raise SystemExit('the last')"]
    assert run(argv, tmp_path / "log", 60.0) == "exit code 1: the last"
    assert run([sys.executable, "-c", "pass"], tmp_path / "log", 60.0) is None


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    began, kept = time.monotonic(), tmp_path / "child"
    child = f"import time\nwhile True: open({str(kept)!r}, 'a').write('.'); time.sleep(0.05)"
    parent = (
        "import subprocess, sys, time\nprint('begins', flush=True)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)"
    )
    argv = [sys.executable, "-c", parent]
    failed = run(argv, tmp_path / "log", 1.5)
    assert failed is not None and failed.startswith("not done after 2 s; the last line was: begins")
    assert time.monotonic() - began < 60
    size = kept.stat().st_size if kept.exists() else 0
    time.sleep(0.3)
    assert (kept.stat().st_size if kept.exists() else 0) == size, "the child has ended, too"


def test_ranks_are_ended_once_one_fails(tmp_path: Path) -> None:
    commands = [
        [sys.executable, "-c", "import time; time.sleep(600)"],
        [sys.executable, "-c", "raise SystemExit('no')"],
    ]
    assert run_all(commands, [tmp_path / "0", tmp_path / "1"], 300.0, [{}, {}]) == "exit code 1: no"
