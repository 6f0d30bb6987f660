"""Parameters whose rows live on one rank each: trained, evaluated, saved and loaded as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import run_ranks
from tests.gloo.sharded import SHARED_OUT, everything, net

RANKS = 3


@pytest.fixture(scope="module")
def findings() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything)


@pytest.fixture(params=SHARED_OUT)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ranks(findings: list[dict[str, Any]], strategy: str) -> list[dict[str, Any]]:
    return [found[strategy] for found in findings]


@pytest.mark.parametrize("what", ["trained", "evaluated", "copied", "resumed"])
def test_equals_one_process(ranks: list[dict[str, Any]], what: str) -> None:
    assert all(r[what] <= 1e-12 for r in ranks), [r[what] for r in ranks]


def test_each_rank_holds_its_rows_and_no_others(ranks: list[dict[str, Any]], strategy: str) -> None:
    height = {name: net().get_parameter(name).shape[0] for name in SHARED_OUT[strategy]}
    for rank, found in enumerate(ranks):
        assert found["held"] == {name: len(range(rank, rows, RANKS)) for name, rows in height.items()}
        assert set(found["stored"].values()) == {8}  # one element


def test_a_model_whose_rows_are_elsewhere_neither_runs_nor_is_saved_or_copied(ranks: list[dict[str, Any]]) -> None:
    assert all(r["refused"] == [True] * 5 for r in ranks)


def test_what_is_written_to_a_parameter_whose_rows_are_elsewhere_is_refused_by_name(
    ranks: list[dict[str, Any]],
) -> None:
    assert all(len(r["written to"]) == 8 and all(r["written to"]) for r in ranks)


def test_nothing_done_while_the_parameters_are_whole_destroys_them(ranks: list[dict[str, Any]]) -> None:
    """Within `gathered`, a model is evaluated, captured, saved and loaded; a step and a folder to load are refused."""
    for found in ranks:
        assert found["within"]["refused"] == [True, True]
        assert all(abs(more - 1) < 1e-6 for more in found["within"]["more"]), "what was changed is in the state"
        assert found["unharmed"] <= 1e-12


def test_different_numbers_of_micro_batches_are_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert all("equally many" in r["uneven"] for r in ranks)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_sixteen_bits_on_the_wire_err_a_little_and_not_by_none(ranks: list[dict[str, Any]], wire: str) -> None:
    """SGD's first step is the gradient, times a learning rate of 1."""
    roundoff = {"bfloat16": 2.0**-9, "float16": 2.0**-12}[wire]
    assert all(0 < r[wire] <= 4 * roundoff for r in ranks), [r[wire] for r in ranks]
