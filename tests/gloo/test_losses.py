"""Losses of all kinds on two ranks with uneven batches: as in one process, or said not to be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.losses import CASES, everything
from tests.gloo.ranks import run_ranks

SUMS = ("sum", "divided by what one rank's size is", "sum, of one sample each, eager")
NOT_SAID_BY_ONE_WEIGHT = {
    "contrastive": "is not the mean of what its parts lose",
    "contrastive, of one sample each": "of two samples put together it is",
    "pairs, of one sample each, eager": "of two samples put together it is",
    "two counts": "different counts",
    "labelled": "compares samples with each other cannot be seen: the model does not run on a part of the batch",
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("name", [n for n in CASES if n not in NOT_SAID_BY_ONE_WEIGHT])
def test_trains_as_one_process_would(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(ranks):
        distance, loss, said = found[name]
        assert max(distance, loss) <= 1e-12
        if rank == 0 and name in SUMS:
            assert len(said) == 1 and "is a sum over the batch" in said[0]
            assert "losses.py:" in said[0] or name.endswith("eager")
        elif rank == 0 and name == "units differ":
            assert len(said) == 1 and "over samples on rank 1" in said[0] and "counts by its samples" in said[0]
        elif rank == 0 and name == "empty, bounded":
            assert len(said) == 1 and "through 'clamp'" in said[0]
        else:
            assert said == []


@pytest.mark.parametrize("name", NOT_SAID_BY_ONE_WEIGHT)
def test_what_one_weight_cannot_say_is_said_once_on_rank_0(ranks: list[dict[str, Any]], name: str) -> None:
    assert ranks[0][name][0] > 1e-5
    (said,) = ranks[0][name][2]
    assert NOT_SAID_BY_ONE_WEIGHT[name] in said and "weight=lambda batch" in said
    assert "losses.py:" in said or name.endswith("eager")
    assert ranks[1][name][2] == []


def test_a_unit_that_changes_on_one_rank_alone_is_said_once(ranks: list[dict[str, Any]]) -> None:
    on_one, on_both, while_one_is_empty = ranks[0]["switched"]
    assert len(on_one) == 1 and "what the loss divides by on rank 0, and over targets" in on_one[0]
    assert on_both == while_one_is_empty == [] and ranks[1]["switched"] == [[], [], []]


def test_a_term_across_samples_is_seen_whenever_it_comes(ranks: list[dict[str, Any]]) -> None:
    """Also where no rank has all rows of the parameters, and where no graph shows it."""
    assert [[len(said) for said in found["grown"]] for found in ranks] == [[1, 1, 1], [0, 1, 1]]
    assert all(len(found["grown, of one sample each"]) == 1 for found in ranks)


def test_an_eager_models_loss_is_looked_at_while_its_gradients_are_on_their_way(ranks: list[dict[str, Any]]) -> None:
    expected = ["forward", "gradients", *(3 * ["forward"])]
    assert [found["looked at"] for found in ranks] == [expected, expected]


def test_micro_batches_are_as_one_batch(ranks: list[dict[str, Any]]) -> None:
    assert all(max(found["micro-batches"]) <= 1e-12 for found in ranks)


def test_the_drop_in_module_counts_an_empty_batch_as_nothing(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        exact, sixteen_bits = found["module"]
        assert exact <= 1e-12 and sixteen_bits <= 0.02


def test_a_rank_with_nothing_to_add_does_not_spoil_16_bits(ranks: list[dict[str, Any]]) -> None:
    assert all(found["16 bits"] for found in ranks)
