"""Checkpoints on disk, of several ranks: read by any plan on any number of ranks, written as a whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gloo.disk import chain, residual_of, two_ranks
from tests.gloo.ranks import run_ranks, run_worlds

CHAIN = {4: "spread", 2: "ddp", 3: "PS", 1: "ddp"}
"""How many ranks, one after the other, and their plans."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("chain") / "checkpoint")
    return run_worlds(chain, {n: (folder, plan, i, i + 1) for i, (n, plan) in enumerate(CHAIN.items())})


@pytest.mark.parametrize("n", CHAIN)
def test_any_number_of_ranks_goes_on(worlds: dict[int, list[dict[str, Any]]], n: int) -> None:
    for found in worlds[n]:
        assert found.get("loaded", True) and found["read by one process"]
        assert found["distance"] < 1e-10
        assert found["steps"] == list(CHAIN).index(n) + 1


@pytest.mark.parametrize("n", CHAIN)
def test_every_element_is_written_once(worlds: dict[int, list[dict[str, Any]]], n: int) -> None:
    for found in worlds[n]:
        assert found["elements"] and found["files"]


def test_each_rank_writes_what_it_has(worlds: dict[int, list[dict[str, Any]]]) -> None:
    of_four, of_two, of_three = (worlds[n][0] for n in (4, 2, 3))
    for name in ("model.table.weight", "model.inner.weight", "optimizer.table.weight.exp_avg"):
        assert of_four["layouts"][name] == "Shard"
        assert of_four["written by"][name] == [0, 1, 2, 3]
    assert of_four["layouts"]["optimizer.last.weight.exp_avg"] == "Shard"
    assert {of_two["layouts"][n] for n in of_two["layouts"] if n.startswith(("model", "opt"))} == {"Replicate"}
    assert {tuple(ranks) for n, ranks in of_two["written by"].items() if n.startswith("model")} == {(0,), (1,)}
    assert "Owned" in of_three["layouts"].values()


def test_the_sum_of_the_ranks_own_values_goes_over(worlds: dict[int, list[dict[str, Any]]]) -> None:
    total = torch.stack([residual_of(r) for r in range(4)]).sum(0)
    for n in (2, 3, 1):
        for rank, found in enumerate(worlds[n]):
            residual, own, rows = found["pieces"]
            assert residual == pytest.approx((total / n).tolist(), rel=1e-6)
            assert own == [0.0, 0.0]
            assert rows == list(range(8))[rank::n]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, two_ranks, str(tmp_path_factory.mktemp("disk") / "deep" / "checkpoint"))


@pytest.mark.parametrize("what", ["resumed", "same bits", "other plan", "own values", "hooks"])
def test_goes_on_as_if_it_had_not_been_interrupted(ranks: list[dict[str, Any]], what: str) -> None:
    assert [r[what] for r in ranks] == [True, True]


REASONS = {
    "full": (1, "cannot save the checkpoint, so what the folder held before stays", "cannot write the file"),
    "no folder": (1, "cannot save the checkpoint, so what the folder held before stays", "cannot make the folder"),
    "not shared": (0, "cannot save the checkpoint, so what the folder held before stays", "rank 0 does not see"),
    "missing": (1, "cannot load the checkpoint, so no rank has changed anything", "no such folder"),
    "altered": (1, "cannot load the checkpoint, so no rank has changed anything", "was altered or damaged"),
}


@pytest.mark.parametrize("what", REASONS)
def test_where_one_rank_fails_all_are_told(ranks: list[dict[str, Any]], what: str) -> None:
    who, refusal, cause = REASONS[what]
    there, elsewhere = ranks[who][what], ranks[1 - who][what]
    assert cause in there
    assert elsewhere == f"rank {who} {refusal}: {there}"


def test_versions_of_modules_are_kept_and_texts_of_meetings_are_not(ranks: list[dict[str, Any]]) -> None:
    assert all(r["versions"] and r["store"] for r in ranks)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(ranks: list[dict[str, Any]]) -> None:
    assert all(r["old one stays"] and r["old one stays too"] for r in ranks)


def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert all(r["unchanged"] for r in ranks)
    assert all("are given different checkpoints" in r["different"] for r in ranks)
