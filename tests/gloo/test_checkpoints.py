"""Checkpoints of two ranks: resumed bit for bit, loaded by all ranks or by none, and called for by all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.checkpoints import everything
from tests.gloo.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("dcp")))


@pytest.mark.parametrize("what", ["resumed", "back to the start", "dcp"])
def test_goes_on_as_if_it_had_not_been_interrupted(ranks: list[dict[str, Any]], what: str) -> None:
    assert [r[what] for r in ranks] == [True, True]


def test_gradients_that_dcp_has_nowhere_to_load_into_are_said_to_be_lost(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["dcp, delayed"] == [[False, True], [True, False]]
    assert ranks[1]["dcp, delayed"] == [[False, False], [True, False]]  # rank 0 says it


@pytest.mark.parametrize("saved", ["old", "three", "twice the same"])
def test_streams_of_another_number_of_ranks_differ_by_rank(ranks: list[dict[str, Any]], saved: str) -> None:
    assert ranks[0][f"masks, {saved}"] != ranks[1][f"masks, {saved}"]


def test_what_one_rank_refuses_no_rank_loads(ranks: list[dict[str, Any]]) -> None:
    (said_0, unchanged_0), (said_1, unchanged_1) = (r["refused by one"] for r in ranks)
    assert unchanged_0 and unchanged_1
    assert said_1 == (
        "the checkpoint's optimizer state of '0.weight' has, as 'exp_avg', a tensor of shape (3,); expected (8, 6)"
    )
    assert said_0 == f"rank 1 cannot load the checkpoint, so no rank has changed anything: {said_1}"


def test_different_checkpoints_are_refused(ranks: list[dict[str, Any]]) -> None:
    for said, unchanged in (r["given different ones"] for r in ranks):
        assert unchanged
        assert "are given different checkpoints" in said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("steps", "rank 1 has gone on without it"),
        ("loads", "rank 1 is in program.load_state_dict()"),
        ("idle", "rank 1 is late"),
    ],
)
def test_a_rank_that_saves_alone_is_told_so(ranks: list[dict[str, Any]], what: str, said: str) -> None:
    message = ranks[0]["alone"][what]
    assert message.startswith("all ranks must call program.state_dict() together, and rank 0 does")
    assert said in message
    assert "if program.rank == 0: torch.save" in message
