"""What ranks say when one of them disagrees, dies, or is late: who it was, soon, and with an exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo.ranks import free_port

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
                           timeout_s=5.0 if trouble == "late" else 60.0)
for step in range(4):
    if step == 2 and rank == 1:
        if trouble == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "late":
            time.sleep(16)
        if trouble == "raises":
            raise RuntimeError("the data ran out")
    program.step(batch)
print("done", flush=True)
"""


def run_script(tmp_path: Path, trouble: str, world_size: int = 3) -> list[tuple[int, str]]:
    """Starts the script on every rank; returns each one's exit status and what it wrote, killing who hangs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    common = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), trouble],
            env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(world_size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world_size)
    ]
    try:
        return [(p.wait(), o) for p, o in ((p, p.communicate(timeout=120)[0]) for p in ranks)]
    finally:
        for p in ranks:
            p.kill()


def test_without_trouble_every_rank_ends_well(tmp_path: Path) -> None:
    assert [status for status, _ in run_script(tmp_path, "none")] == [0, 0, 0]


@pytest.mark.parametrize("trouble", ["plans", "models"])
def test_ranks_that_disagree_say_so_before_the_first_step(tmp_path: Path, trouble: str) -> None:
    for status, output in run_script(tmp_path, trouble):
        assert status not in (0, -9), output
        assert "Error" in output
        assert {"plans": "disagree about the plan", "models": "hold different models"}[trouble] in output


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("dies", "rank 1 is gone"), ("late", "rank 1 is late"), ("raises", "rank 1 has ended")],
)
def test_a_rank_that_is_gone_or_late_is_named_by_the_others(tmp_path: Path, trouble: str, said: str) -> None:
    outcomes = run_script(tmp_path, trouble)
    for rank, (status, output) in enumerate(outcomes):
        assert status != 0
        if rank != 1:
            assert "CollectiveError" in output, output
            assert said in output, output
    if trouble == "raises":
        assert "the data ran out" in outcomes[1][1]
        assert "CollectiveError" not in outcomes[1][1]
