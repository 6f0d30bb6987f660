"""Lightning with strategy="autopar": as with DDP where ranks are even, and as one process always."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gloo.frameworks import ROOT, apart
from tests.gloo.ranks import run_worlds

pytest.importorskip("lightning")
pytest.importorskip("peft")

from tests.gloo.lightnings import everything
from tests.tiers import thorough


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, {1: (), 2: ()})


def test_equals_ddp_where_ranks_are_even(found: dict[int, list[dict[str, Any]]]) -> None:
    """With dropout, accumulation, clipping, a parameter beside the modules, and one that is never used: parameters,
    losses, and what is logged."""
    assert all(apart(rank["even aut"], rank["even ddp"]) < 1e-12 for rank in found[2])


def test_trains_and_validates_with_the_buffers_of_rank_0_as_ddp(found: dict[int, list[dict[str, Any]]]) -> None:
    """Each rank's own losses, in every epoch: of running statistics, of those beside averaged weights, and of a buffer
    that the step reads and writes."""
    assert all(apart(rank["validated aut"], rank["validated ddp"]) < 1e-10 for rank in found[2])


@pytest.mark.parametrize(
    "way",
    ["forward", "parts", "by hand", "beside", "LoRA", "evaluating", "turns", "penalty", "checkpoint", "both kinds"],
)
def test_equals_one_process_where_they_are_not(found: dict[int, list[dict[str, Any]]], way: str) -> None:
    assert all(apart(rank[way], found[1][0][way]) < 1e-12 for rank in found[2])


def test_plans_stay_once_it_has_trained(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all(rank["plans"] == [""] for rank in found[2])


def test_goes_on_from_a_checkpoint(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all(rank["resumed"] for rank in found[2])


@thorough
def test_the_example_starts_its_processes_and_runs() -> None:
    taken = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in taken} | {"PYTHONPATH": str(ROOT)}
    example = [sys.executable, str(ROOT / "examples" / "lightning_trainer.py")]
    done = subprocess.run(example, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "under autopar" in done.stdout


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("compiled", "pass compile=True to the strategy"),
        ("a module without a forward", 'make a Trainer with strategy="autopar"'),
        ("a trainer", 'make it with strategy="autopar"'),
        ("misspelt", "did you mean 'fidelity'?"),
        ("hook", 'ddp_comm_hook is of DistributedDataParallel: leave it out; fidelity="rounded"'),
    ],
)
def test_says_what_to_do(found: dict[int, list[dict[str, Any]]], case: str, message: str) -> None:
    assert message in found[2][0]["says"][case]
