"""`autopar run` as users call it: torchrun starts the ranks, the plan reaches the script, its exit code comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from tests.tiers import thorough

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
from torch import nn
import autopar

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
batch = (torch.randn(2, 8), torch.randn(2, 4))
program = autopar.optimize(model, example_inputs=batch, loss_fn=nn.functional.mse_loss,
                           optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
losses = [program.step(batch).item() for _ in range(3)]
# One write: torchrun starts ranks unbuffered, and two of them share the output.
said = f"plan {program.plan.name} {program.plan.cluster.world_size} falls {losses[-1] < losses[0]}"
sys.stdout.write(said + "\\n")
sys.exit(int(sys.argv[1]))
"""


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autopar", "run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = (torch.randn(2, 8), torch.randn(2, 4))
    cluster = autopar.ClusterSpec.local(2)
    made = autopar.plan(model, cluster, example_inputs=batch, loss_fn=nn.functional.mse_loss, strategy="PartitionedPS")
    path = tmp_path / "plan.json"
    made.save(path)
    return path


def test_the_script_runs_on_every_rank_under_the_plan(plan: Path) -> None:
    result = _run(plan.parent, "plan.json", "train.py", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("plan PartitionedPS 2 falls True") == 2, result.stdout + result.stderr


@thorough
def test_the_exit_code_of_a_script_that_fails_comes_back(plan: Path) -> None:
    assert _run(plan.parent, "plan.json", "train.py", "3").returncode != 0


def test_a_missing_plan_is_said_without_a_traceback(plan: Path) -> None:
    result = _run(plan.parent, "other.json", "train.py", "0")
    assert result.returncode != 0
    assert "other.json" in result.stderr
    assert "Traceback" not in result.stderr
