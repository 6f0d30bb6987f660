"""Hugging Face's Trainer under autopar: as under DDP where ranks are even, and as one process always."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.frameworks import apart
from tests.gloo.ranks import run_worlds

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from tests.gloo.trainer import everything


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    return run_worlds(everything, {1: (), 2: ()})


def test_equals_ddp_where_ranks_are_even(found: dict[int, list[dict[str, Any]]]) -> None:
    """With dropout, tied weights, accumulation, clipping, evaluation: parameters, losses and gradient norms."""
    for rank in found[2]:
        weights, history = rank["ddp"]
        assert apart(rank["autopar"][0], weights) < 1e-5
        assert apart(rank["autopar"][1], history) < 1e-5


def test_goes_on_from_a_checkpoint(found: dict[int, list[dict[str, Any]]]) -> None:
    """With the optimizer, and the dropout that an uninterrupted run has."""
    for rank in found[2]:
        weights, history, again, rest = rank["autopar"]
        assert again == weights
        assert rest == history


@pytest.mark.parametrize("run", ["LoRA, smoothed labels", "ignores the items", "a loss of one's own"])
def test_equals_one_process_where_they_are_not(found: dict[int, list[dict[str, Any]]], run: str) -> None:
    weights, history = found[1][0][run]
    for rank in found[2]:
        assert apart(rank["uneven"][run][0], weights) < 1e-6
        assert apart(rank["uneven"][run][1], history) < 2e-6


def test_tells_losses_that_are_divided_by_the_items(found: dict[int, list[dict[str, Any]]]) -> None:
    """Captured or not, and whatever the order of the inputs, which is no other capture."""
    assert all(rank["weights"] == [[0.5, 1], [0.5, 1], [0.7, 1]] for rank in found[2])


def test_says_where_ddp_would_have_other_gradients(found: dict[int, list[dict[str, Any]]]) -> None:
    told = [[w for w in rank["warned"] if "ignores num_items_in_batch" in w] for rank in found[2]]
    assert [len(t) for t in told] == [2, 0]
    assert told[0][0].startswith("BertForSequenceClassification's loss") and told[0][1].startswith("Scored's loss")
    assert "with the number of ranks, 2; here they are those of one process" in told[0][0]


def test_the_examples_run(found: dict[int, list[dict[str, Any]]]) -> None:
    assert all("loss 2." in text and "under" in text for text in found[2][0]["examples"][:1])
    assert "8 parameters under" in found[2][0]["examples"][1]


def test_says_what_to_do(found: dict[int, list[dict[str, Any]]]) -> None:
    rank = found[2][0]
    assert "call autopar.integrations.transformers.use(trainer) before" in rank["given to optimize"]
    assert rank["no trainer"].startswith("SpecError: use() takes a transformers.Trainer, not Scored")
