"""A minute of the fuzzer, with a seed that stays: random models and plans, beside eager PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import ROOT


@pytest.mark.timeout(600)
def test_random_models_and_plans_are_equal_to_eager_pytorch() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.fuzz",
        "--models",
        "60",
        "--plans",
        "24",
        "--seed",
        "1",
        "--shrink",
        "5",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "60 models and 24 plans" in done.stdout
