"""accelerate under autopar: as under DDP where ranks are even, and as one process always."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.constants import default_pg_timeout

from tests.gloo.frameworks import apart
from tests.gloo.ranks import run_worlds

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from tests.gloo.accelerated import everything


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, {1: (), 2: ()})


def test_equals_ddp_where_ranks_are_even(found: dict[int, list[dict[str, Any]]]) -> None:
    """With dropout, a shared weight, accumulation, clipping: parameters and losses."""
    assert all(apart(rank["even autopar"], rank["even ddp"]) < 1e-12 for rank in found[2])


def test_evaluates_with_the_running_statistics_of_rank_0_as_ddp(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all(apart(rank["evaluated autopar"], rank["evaluated ddp"]) < 1e-10 for rank in found[2])


@pytest.mark.parametrize(
    "run", ["plain", "accumulated", "run eagerly", "both kinds", "normalized", "LoRA", "its own loader"]
)
def test_equals_one_process_where_they_are_not(found: dict[int, list[dict[str, Any]]], run: str) -> None:
    assert all(apart(rank[run], found[1][0][run]) < 1e-12 for rank in found[2])


def test_waits_for_a_late_rank_as_long_as_the_framework(found: dict[int, list[dict[str, Any]]]) -> None:
    """Which has the default of PyTorch, longer than autopar's."""
    assert all(rank["timeout"] == default_pg_timeout.total_seconds() > 300 for rank in found[2])


def test_goes_on_from_a_saved_state(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all(rank["resumed"] for rank in found[2])


def test_the_example_runs(found: dict[int, list[dict[str, Any]]]) -> None:
    assert "loss 0." in found[2][0]["example"] and "no plan" not in found[2][0]["example"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("too late", "has prepared a model: call use"),
        ("wrapped", "wrapped in DistributedDataParallel already"),
        ("given to optimize", "call autopar.integrations.accelerate.use"),
        ("a prepared model", "wrapped in DropIn already"),
        ("joins", "all ranks get equally many batches"),
        ("hook", "communication hook fp16"),
        ("own buffers", "under autopar all ranks have rank 0's: leave it out"),
        ("a word misspelt", "did you mean 'fidelity'?"),
        ("a value misspelt", "did you mean 'rounded'?"),
        ("no such plan", "did you mean 'zero1'?"),
        ("of the framework", "leave optimizer out: the framework runs it"),
        ("clips", "leave clip_grad_norm out: the framework clips"),
        ("no plan yet", "before the first training batch"),
        ("frozen", "before the first training batch"),
        ("compiles", "pass compile=True"),
    ],
)
def test_says_what_to_do(found: dict[int, list[dict[str, Any]]], case: str, message: str) -> None:
    assert message in found[2][0]["says"][case]
