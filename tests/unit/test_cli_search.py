"""`autopar search`: a journal beside the plan, resuming, stopping, and what a user may get wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner, Result

from autopar.cli.app import app
from autopar.cli.planning import Asked
from autopar.cli.trained import Trained
from autopar.cli.trial_ranks import Where, measuring
from autopar.spec.cluster import ClusterSpec

FACTORY = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return model, (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)), nn.functional.cross_entropy
"""


def run(folder: Path, *arguments: str) -> Result:
    (folder / "model.py").write_text(FACTORY)
    return CliRunner().invoke(app, ["search", f"{folder}/model.py:make", "--cluster", "local:2", *arguments])


def test_a_search_is_resumed_from_the_journal_beside_its_plan(tmp_path: Path) -> None:
    output, journal = tmp_path / "plan.json", tmp_path / "plan.journal.jsonl"
    first = run(tmp_path, "-o", str(output), "--evaluations", "60")
    assert first.exit_code == 0, first.output
    whole, text = output.read_bytes(), journal.read_bytes()
    journal.write_bytes(text[: len(text) // 2])
    again = run(tmp_path, "-o", str(output), "--evaluations", "60", "--resume")
    assert again.exit_code == 0, again.output
    assert output.read_bytes() == whole
    assert "plans priced in" in again.output
    other = run(tmp_path, "-o", str(output), "--evaluations", "60", "--seed", "1", "--resume")
    assert other.exit_code == 2 and "seed 0 where this one has 1" in other.stderr
    assert output.read_bytes() == whole


def test_a_search_with_nothing_to_resume_says_that_it_begins_anew(tmp_path: Path) -> None:
    arguments = ("-o", str(tmp_path / "plan.json"), "--evaluations", "1", "--resume")
    first, again = run(tmp_path, *arguments), run(tmp_path, *arguments)
    assert first.exit_code == again.exit_code == 0, first.output
    assert f"no journal {tmp_path / 'plan.journal.jsonl'} to resume: the search begins anew" in first.stderr
    assert "begins anew" not in again.stderr


def test_mistakes_are_told_before_the_work(tmp_path: Path) -> None:
    for arguments, told in (
        (("-o", str(tmp_path / "no" / "plan.json")), "does not exist"),
        (("--resume",), "--resume needs the journal"),
        (("--searcher", "gredy"), "no searcher is called 'gredy'"),
        (("--journal", str(tmp_path)), "is a folder"),
        (("-o", "/proc/plan.json"), "cannot be written to"),
        (("-o", str(tmp_path / ("p" * 490))), "File name too long"),
        (("-o", str(tmp_path / ("p" * 248))), "File name too long"),  # of the journal
        (("-o", str(tmp_path / "p"), "--journal", str(tmp_path / "p")), "is the file of -o as well"),
        (("--journal", str(tmp_path / "model.py")), "is the file of MODEL as well"),
        (
            ("--journal", str(tmp_path / "j"), "--trials-log", str(tmp_path / "j")),
            "--trials-log '" + str(tmp_path / "j") + "' is the file of --journal as well",
        ),
        (("--trials", "2", "--global-batch", "8"), "leave one out"),
        (("--steps", "9", "--global-batch", "8"), "leave one out"),
        (("--resume", "-o", str(tmp_path / "p.json"), "--measure-compute"), "leave one out"),
    ):
        found = run(tmp_path, *arguments)
        assert (found.exit_code, told in found.output) == (2, True), found.output
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


def test_where_all_trials_fail_it_is_said(tmp_path: Path) -> None:
    output = str(tmp_path / "plan.json")
    done = run(tmp_path, "-o", output, "--evaluations", "1", "--trials", "2", "--launch", "false")
    assert done.exit_code == 0 and "warning: all 2 trials failed" in done.stderr, done.output
    assert "rests on its prediction: all trials failed" in done.stderr and "expected to pay" not in done.stderr


def test_an_interrupt_keeps_the_best_plan_so_far(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    output, journal = tmp_path / "plan.json", tmp_path / "plan.journal.jsonl"
    line = ["-m", "autopar", "search", f"{tmp_path}/model.py:make", "--cluster", "local:2", "-o", str(output)]
    searching = subprocess.Popen(
        [sys.executable, *line, "--searcher", "random", "--evaluations", "1000000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 20) and time.monotonic() < deadline:
        assert searching.poll() is None, searching.communicate()[1]
        time.sleep(0.1)
    searching.send_signal(signal.SIGINT)
    said = searching.communicate(timeout=120)[1]
    assert searching.returncode == 130, said
    assert output.exists() and "the search was interrupted" in said and "Traceback" not in said


def test_a_rank_on_a_processor_trains_there_whatever_else_its_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(FACTORY)

    @contextlib.contextmanager
    def no_ranks(where: Where, spec: ClusterSpec) -> Iterator[tuple[None, str]]:
        yield None, "nowhere"

    monkeypatch.setattr(Where, "pool", no_ranks)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("RANK", "1")
    here = Where(here=True, lab=False, launch=None, folder=None)
    asked = SimpleNamespace(optimizer=None, dtype=None, autocast=None)
    with measuring(f"{tmp_path}/model.py:make", ClusterSpec.local(2), cast(Asked, asked), here) as measure:
        trained = Trained(*map(str, measure.compute.arguments))
    assert {p.device.type for p in trained.model().parameters()} == {"cpu"}
