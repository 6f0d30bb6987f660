"""On two ranks: what would lead to other numbers than one process has is right, or is said, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.other_numbers import everything
from tests.gloo.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize(
    "what",
    [
        "column slices",
        "gradients in one memory",
        "no elements first",
        "gradients of inputs",
        "gradients that are nothing",
        "dropout that is kept",
        "nothing saved",
        "a sum over uneven micro-batches",
    ],
)
def test_equals_one_process(ranks: list[dict[str, Any]], what: str) -> None:
    assert all(r[what] <= 1e-10 for r in ranks), [r[what] for r in ranks]


def test_buffers_that_are_read_and_written_are_alike_and_said_once(ranks: list[dict[str, Any]]) -> None:
    (first, said), (second, nothing) = (r["shared buffers"] for r in ranks)
    assert first == second
    assert len([s for s in said if "reads and writes 'mean'" in s]) == 1
    assert any("the loss" in s and "is not the mean of what its parts lose" in s for s in said), (
        "the average mixes them"
    )
    assert not nothing


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("other rates", "PlanMismatchError: rank 0 and rank 1 disagree about the settings"),
        ("other activations", "PlanMismatchError: rank 0 and rank 1 compute different things"),
    ],
)
def test_ranks_that_train_otherwise_are_refused(ranks: list[dict[str, Any]], what: str, says: str) -> None:
    assert ranks[0][what].startswith(says), ranks[0][what]
    assert ranks[1][what].startswith("PlanMismatchError")


@pytest.mark.parametrize("what", ["an activation", "a factor", "a whole factor"])
def test_ranks_that_compute_otherwise_on_uneven_batches_are_told(ranks: list[dict[str, Any]], what: str) -> None:
    for rank, found in enumerate(ranks):
        (said,) = found["uneven"][what]
        assert said.startswith(f"rank {rank} and rank {1 - rank} seem to compute different things"), said
    told = {"an activation": "aten.relu", "a factor": "aten.mul.Tensor 0.4", "a whole factor": "aten.mul.Tensor 3"}
    assert told[what] in said


@pytest.mark.parametrize("what", ["alike", "alike, by shape", "alike, by a case"])
def test_what_differs_with_the_shape_alone_is_not_taken_for_another_model(
    ranks: list[dict[str, Any]], what: str
) -> None:
    assert [found["uneven"][what] for found in ranks] == [[], []]


def test_a_rate_that_one_rank_changes_is_refused_before_anything_is_updated(ranks: list[dict[str, Any]]) -> None:
    for rank, other in ((0, 1), (1, 0)):
        for said in ranks[rank]["rates that change"].values():
            expected = f"PlanMismatchError: rank {rank} and rank {other} have different settings of the optimizer: 'lr'"
            assert said.startswith(expected), said


def test_a_wrong_sum_is_found_by_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["wrong sums"].startswith("VerificationError"), rank["wrong sums"]
        assert "first.weight" in rank["wrong sums"]


def test_gradients_of_rounding_alone_are_right_and_excuse_no_other_in_a_drop_in(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        right, wrong = found["rounding"]
        assert right == "nothing was refused"
        assert "VerificationError" in wrong and "summed over ranks: the gradient of 'last.weight'" in wrong


def test_every_step_may_be_compared_under_any_plan(ranks: list[dict[str, Any]]) -> None:
    assert [r["always compared"] for r in ranks] == ["nothing was refused"] * 2
