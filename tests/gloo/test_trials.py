"""`autopar search --trials` on real ranks: under torchrun, behind a command, on this machine; and a plan that fails."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autopar import ClusterSpec, Plan
from autopar.errors import SpecError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.lab.job import JobFailed
from autopar.lab.trial import RealCompute, TrialSpec
from autopar.search import build_plan
from autopar.spec.lines import read_lines
from autopar.strategies import Context
from autopar.trials.attend import Seat, _Child
from autopar.trials.board import BEAT, Beating, FolderBoard
from autopar.trials.far import Asking, launched
from tests.lab.pool_workloads import workload
from tests.tiers import thorough

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FACTORY = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return model, (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)), nn.functional.cross_entropy
"""
SEARCH = ["search", "model.py:make", "--cluster", "local:2", "--trials", "3", "--evaluations", "20", "-o", "plan.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(FACTORY)
    return tmp_path


def run(folder: Path, line: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def check(folder: Path, found: subprocess.CompletedProcess[str], where: str) -> None:
    assert found.returncode == 0, found.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.measured is not None and plan.measured.rests_on == "trials" and plan.measured.failed == 0
    assert plan.measured.step_time_s == plan.measured.best_step_time_s
    assert 2 <= plan.measured.trials <= 3 and where in plan.measured.where
    assert found.stdout.count("Rests on trials: measured") == 1, "one rank prints"
    rows = list(read_lines(folder / "plan.trials.jsonl"))
    assert [row["status"] for row in rows] == ["ok"] * plan.measured.trials


def test_under_torchrun_all_ranks_run_what_rank_0_tells(folder: Path) -> None:
    check(folder, run(folder, [*TORCHRUN, "-m", "autopar", *SEARCH]), "2 ranks of torchrun's job")


@thorough
def test_a_command_starts_the_ranks_and_the_folder_is_left_as_it_was(folder: Path) -> None:
    launch = shlex.join(TORCHRUN)
    check(folder, run(folder, [sys.executable, "-m", "autopar", *SEARCH, "--launch", launch]), "2 ranks of `")
    assert not list(folder.glob("run-*"))


def test_other_ranks_than_the_cluster_has_end_with_the_reason(folder: Path) -> None:
    line = [*TORCHRUN, "-m", "autopar", *SEARCH]
    line[line.index("local:2")] = "local:3"
    found = run(folder, line)
    assert found.returncode != 0 and "the cluster has 3 ranks, torchrun has started 2" in found.stderr


@thorough
def test_ranks_outlive_a_plan_that_fails_on_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    good = workload()
    graph = training_graph(good.model(), flatten(good.batch(0, 0)), good.loss_fn)
    cluster = ClusterSpec.local(2)
    plan = build_plan("ddp", graph, cluster, Context(2, late_parameters=True).on(cluster))
    specs = {
        how: TrialSpec(plan, RealCompute("tests.lab.pool_workloads:workload", (how,)), steps=2)
        for how in ("well", "dies", "raises")
    }
    with launched(shlex.join(TORCHRUN), tmp_path, 2) as pool:
        found = pool.in_turn(specs, rounds=2)
        assert pool.starts == 3, "once, and once more after each failure"
    statuses = {"well": "ok", "dies": "crashed", "raises": "crashed"}
    assert {name: result.status for name, result in found.items()} == statuses, [r.error for r in found.values()]
    assert len(found["well"].step_s) == 4 and min(found["well"].step_s) > 0
    assert "the data ran out" in found["raises"].error and "rank 1" in found["raises"].error


def test_the_rank_that_failed_first_is_told_though_it_ends_later(tmp_path: Path) -> None:
    """A rank that lost its peer may answer before the peer's process has ended."""
    board = FolderBoard(tmp_path)

    def answer(rank: int, said: str, wrote_s: float) -> None:
        board.put(f"answer/0/{rank}", json.dumps({"failed": said, "late": False, "wrote_s": wrote_s}))

    answer(0, "the connection was closed", 1000.5)
    later = threading.Timer(0.3, answer, (1, "the data ran out", 1000.0))
    later.start()
    with pytest.raises(JobFailed, match="rank 1: the data ran out"):
        Asking(board, 2).start(60).ask({"do": "run"}, 60)
    later.join()


def test_the_search_goes_on_showing_that_it_lives_where_its_folder_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an end that cannot be shown is no error: it would take the best plan's place."""
    monkeypatch.setattr("autopar.trials.board.BEAT_S", 0.01)
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    board = FolderBoard(folder)

    def beat(after: str | None) -> str | None:
        until = time.monotonic() + 30
        while (now := board.get(BEAT)) == after and time.monotonic() < until:
            time.sleep(0.001)
        assert now != after
        return now

    with Beating(board):
        beat(None)
        folder.rename(away)
        time.sleep(0.05)
        away.rename(folder)
        beat(board.get(BEAT))
        folder.rename(away)


def test_a_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    good = workload()
    graph = training_graph(good.model(), flatten(good.batch(0, 0)), good.loss_fn)
    cluster = ClusterSpec.local(2)
    plan = build_plan("ddp", graph, cluster, Context(2).on(cluster))
    with launched("sh -c 'echo no such partition >&2; exit 3'", tmp_path, 2) as pool:
        result = pool.trial(TrialSpec(plan, RealCompute("tests.lab.pool_workloads:workload")))
    assert result.status == "crashed" and "exit status 3:\nno such partition" in result.error
    with pytest.raises(SpecError, match="there is no command 'srunn'"), launched("srunn -N 2", tmp_path, 2):
        raise AssertionError("nothing can be started")


def test_a_rank_is_told_by_whatever_started_it() -> None:
    assert Seat.of({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Seat(3, 8, 1)
    assert Seat.of({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}) == Seat(2, 4, 0)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert Seat.of(mpi) == Seat(1, 2, 1)
    with pytest.raises(SpecError, match="torchrun, srun or mpirun"):
        Seat.of({"RANK": "one"})


@pytest.mark.parametrize(("leads_to", "published"), [("127.0.1.1", "node7"), ("10.0.0.7", "10.0.0.7")])
def test_other_hosts_are_given_no_address_that_leads_each_to_itself(
    leads_to: str, published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("socket.gethostbyname", lambda name: leads_to)
    assert _Child(FolderBoard(tmp_path), Seat(0, 2, 0))._address() == published


def test_mistakes_are_told_before_the_work(folder: Path) -> None:
    cluster = folder / "cluster.json"
    cluster.write_text(json.dumps({"hosts": [{"name": "a", "count": 2, "devices": "1 x cpu"}], "network": "1GbE"}))
    line = [sys.executable, "-m", "autopar", *SEARCH]
    line[line.index("local:2")] = str(cluster)
    found = run(folder, line)
    assert found.returncode == 2 and "nothing says where plans are to run" in found.stderr
