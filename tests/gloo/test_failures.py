"""What ranks say when one of them disagrees, dies, or is late: who it was, soon, and with an exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.verification import IMPORTED_ONCE
from tests.gloo.ranks import free_port

RANKS = 3
SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import autopar
from autopar.search import build_plan

torch.set_num_threads(1)
rank, n, trouble = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
if trouble == "models" and rank == 1:
    model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 4))
batch = (torch.randn(2, 8), torch.randn(2, 4))
plan = None
if trouble in ("plans", "models"):
    name = "PartitionedPS" if trouble == "plans" and rank == 1 else "ddp"
    plan = autopar.plan(model, autopar.ClusterSpec.local(n), example_inputs=batch, loss_fn=nn.functional.mse_loss,
                        strategy=name)
program = autopar.optimize(model, example_inputs=batch, loss_fn=nn.functional.mse_loss, plan=plan, strategy="ddp",
                           optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                           timeout_s=3.0 if trouble == "late" else 60.0)
for step in range(4):
    if step == 2 and rank == 1:
        if trouble == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "late":
            time.sleep(10)
        if trouble == "raises":
            raise RuntimeError("the data ran out")
    program.step(batch)
print("done", flush=True)
"""


STARTER = """
import importlib, json, os, runpy, sys
from pathlib import Path

script, folder, imported, ports, world_size = sys.argv[1:]
for module in json.loads(imported):
    importlib.import_module(module)


def rank_of(trouble, port):
    # A rank's process, forked, or None where all have ended; each is a program of its own in every other respect.
    ranks = {}
    for rank in range(int(world_size)):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size,
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            output = os.open(f"{folder}/{trouble}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return rank
        ranks[pid] = rank
    ended = dict(os.wait() for _ in ranks)
    statuses = {ranks[pid]: os.waitstatus_to_exitcode(status) for pid, status in ended.items()}
    Path(folder, f"{trouble}.json").write_text(json.dumps([statuses[r] for r in sorted(statuses)]))


for trouble, port in json.loads(ports).items():
    if rank_of(trouble, port) is not None:
        sys.argv = [script, trouble]
        runpy.run_path(script, run_name="__main__")
        break
"""
TROUBLES = ("none", "plans", "models", "dies", "late", "raises")
Outcomes = dict[str, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By what is wrong: each rank's exit status, and what it wrote."""
    folder = tmp_path_factory.mktemp("failures")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    told = [json.dumps(IMPORTED_ONCE), json.dumps({t: free_port() for t in TROUBLES}), str(RANKS)]
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(script), str(folder), *told],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        start_new_session=True,
    ) as starter:
        try:
            assert starter.wait(timeout=250) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGKILL)
    return {
        trouble: [
            (status, (folder / f"{trouble}-{rank}.txt").read_text())
            for rank, status in enumerate(json.loads((folder / f"{trouble}.json").read_text()))
        ]
        for trouble in TROUBLES
    }


def test_without_trouble_every_rank_ends_well(outcomes: Outcomes) -> None:
    assert outcomes["none"] == [(0, "done\n")] * RANKS


@pytest.mark.parametrize("trouble", ["plans", "models"])
def test_ranks_that_disagree_say_so_before_the_first_step(outcomes: Outcomes, trouble: str) -> None:
    for status, output in outcomes[trouble]:
        assert status not in (0, -9), output
        assert "Error" in output
        assert {"plans": "disagree about the plan", "models": "hold different models"}[trouble] in output


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("dies", "rank 1 is gone"), ("late", "rank 1 is late"), ("raises", "rank 1 has ended")],
)
def test_a_rank_that_is_gone_or_late_is_named_by_the_others(outcomes: Outcomes, trouble: str, said: str) -> None:
    for rank, (status, output) in enumerate(outcomes[trouble]):
        assert status != 0
        if rank != 1:
            assert "CollectiveError" in output, output
            assert said in output, output
    if trouble == "raises":
        assert "the data ran out" in outcomes[trouble][1][1]
        assert "CollectiveError" not in outcomes[trouble][1][1]
