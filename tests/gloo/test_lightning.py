"""Lightning with strategy="autopar": as with DDP where ranks are even, and as one process always."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.frameworks import apart
from tests.gloo.ranks import run_worlds

pytest.importorskip("lightning")
pytest.importorskip("peft")

from tests.gloo.lightnings import everything


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, {1: (), 2: ()})


def test_equals_ddp_where_ranks_are_even(found: dict[int, list[dict[str, Any]]]) -> None:
    """With dropout, accumulation, clipping, a parameter beside the modules, and one that is never used: parameters,
    losses, and what is logged."""
    assert all(apart(rank["even aut"], rank["even ddp"]) < 1e-12 for rank in found[2])


@pytest.mark.parametrize("way", ["forward", "parts", "by hand", "LoRA"])
def test_equals_one_process_where_they_are_not(found: dict[int, list[dict[str, Any]]], way: str) -> None:
    assert all(apart(rank[way], found[1][0][way]) < 1e-12 for rank in found[2])


def test_goes_on_from_a_checkpoint(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all(rank["resumed"] for rank in found[2])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("beside", "'decoder.weight' has a gradient that no captured module made"),
        ("compiled", "pass compile=True to the strategy"),
        ("a module without a forward", 'make a Trainer with strategy="autopar"'),
        ("a trainer", 'make it with strategy="autopar"'),
        ("hook", 'ddp_comm_hook is of DistributedDataParallel: leave it out; fidelity="rounded"'),
    ],
)
def test_says_what_to_do(found: dict[int, list[dict[str, Any]]], case: str, message: str) -> None:
    assert message in found[2][0]["says"][case]
