"""`autopar verify`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli.app import app

MODEL_FILE = """\
import torch
from torch import nn


def mlp():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, (torch.randn(6, 4), torch.randint(0, 3, (6,))), nn.functional.cross_entropy


def square_of_the_mean(output, target):
    return output.mean().square()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8).bfloat16(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.bfloat16())).float())


def mixed():
    return Mixed(), (torch.randn(6, 4), torch.randint(0, 3, (6,))), nn.functional.cross_entropy


def no_mean_over_samples():
    return nn.Linear(4, 1), (torch.arange(24.0).reshape(6, 4), torch.zeros(6)), square_of_the_mean
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["verify", *args])


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "verified_model.py"
    path.write_text(MODEL_FILE)
    return path


def test_a_plan_made_in_float32_is_proven_in_float64_and_in_its_own_dtype(model_file: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    made = CliRunner().invoke(
        app, ["plan", f"{model_file}:mlp", "--cluster", "local:2", "--strategy", "PartitionedPS", "-o", plan]
    )
    assert made.exit_code == 0, made.output
    done = run(f"{model_file}:mlp", "--plan", plan, "--steps", "2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == lines[5].split() == ["step", "loss", "gradient", "parameter", "buffer", "most", "in"]
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    assert lines[3].startswith("equal: largest difference ") and "(2 ranks, float64, computed in float64)" in lines[3]
    assert lines[8].startswith("equal: ") and "(2 ranks, the model's own dtypes, computed in float32)" in lines[8]


@pytest.mark.parametrize("strategy", ["sharded", "column_parallel"])
def test_a_plan_that_spreads_parameters_is_proven(model_file: Path, strategy: str) -> None:
    done = run(f"{model_file}:mlp", "--strategy", strategy, "--world-size", "2", "--steps", "2", "--dtype", "float64")
    assert done.exit_code == 0, done.output


def test_a_model_that_does_not_run_in_float64_is_compared_in_its_own_dtypes(model_file: Path) -> None:
    done = run(f"{model_file}:mixed", "--strategy", "ddp", "--world-size", "2", "--steps", "1", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [c["computed_in"] for c in told["comparisons"]] == ["bfloat16"]
    assert "does not run in float64 (RuntimeError: mat1 and mat2 must have the same dtype" in told["notes"][0]
    refused = run(f"{model_file}:mixed", "--dtype", "float64")
    assert refused.exit_code == 2 and "--dtype own" in refused.stderr


def test_what_differs_from_one_process_exits_with_4(model_file: Path) -> None:
    done = run(
        f"{model_file}:no_mean_over_samples",
        "--strategy",
        "ddp",
        "--world-size",
        "2",
        "--steps",
        "1",
        "--json",
        "--dtype",
        "float64",
    )
    assert done.exit_code == 4, done.output
    assert json.loads(done.stdout)["passed"] is False
    assert done.stderr.splitlines()[-1].startswith("error: step 0: the distributed program differs")


def test_a_lossy_plan_by_name_has_nothing_to_be_compared_with(model_file: Path) -> None:
    done = run(f"{model_file}:mlp", "--strategy", "quantized", "--world-size", "2", "--steps", "1")
    assert done.exit_code == 2 and "there is nothing to compare it with" in done.stderr


def test_what_is_wrong_is_said_before_ranks_are_started(model_file: Path) -> None:
    assert run(f"{model_file}:mlp", "--plan", "a.json", "--strategy", "ddp").exit_code == 2
    done = run(f"{model_file}:mlp", "--strategy", "zeroo1")
    assert done.exit_code == 2 and "did you mean 'zero1'?" in done.stderr and "rank 0" not in done.stderr
    done = run(f"{model_file}:nothing")
    assert done.exit_code == 2 and "has no 'nothing'" in done.stderr and "gloo ranks" not in done.stderr
