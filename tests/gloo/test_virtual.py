"""Virtual compute issues what real compute issues: the same collectives, in the same order, of the same sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import run_ranks
from tests.gloo.virtual import compare, disagree

CASES = [
    (name, clips)
    for name in (
        "ddp",
        "all_reduce_one_bucket+bf16",
        "PS",
        "PSLoadBalancing",
        "UnevenPartitionedPS",
        "zero1",
        "zero1+late",
        "Parallax",
        "structured",
        "sharded_head",
        "sharded_tables",
        "hierarchical+bf16",
    )
    for clips in (False, True)
]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(4, compare, CASES)


@pytest.mark.parametrize("case", [f"{name} {clips}" for name, clips in CASES])
def test_the_collectives_are_those_of_real_compute(ranks: list[dict[str, Any]], case: str) -> None:
    for found in (rank[case] for rank in ranks):
        assert len([c for c in found["real"] if not c.startswith("wait")]) >= 3, found
        assert found["virtual"] == found["real"]
        assert len(set(found["hashes"])) == 1


@pytest.mark.parametrize("case", [f"{name} {clips}" for name, clips in CASES])
def test_a_step_takes_the_devices_time_and_returns_the_mean_loss(ranks: list[dict[str, Any]], case: str) -> None:
    for found in (rank[case] for rank in ranks):
        assert found["took_s"] >= found["device_s"]
        assert found["loss"] == pytest.approx(1.0, rel=1e-6)
    # The slowest rank's compute as the simulation has it, less the hosts' part in handing collectives over.
    assert max(r[case]["device_s"] for r in ranks) <= 3.0 * ranks[0][case]["compute_s"] * (1 + 1e-9)


def test_ranks_with_different_plans_say_so_before_the_first_step() -> None:
    for said in run_ranks(2, disagree):
        assert said.startswith("PlanMismatchError") and "order of collectives" in said
