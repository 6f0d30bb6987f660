"""Ways to train on three ranks with unequal batches: each as one process would."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.ranks import run_ranks
from tests.gloo.training import everything


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(3, everything)


@pytest.mark.parametrize("what", ["new shapes", "micro-batches", "resumed", "module", "copied"])
def test_equals_one_process(ranks: list[dict[str, Any]], what: str) -> None:
    assert all(r[what] <= 1e-10 for r in ranks), [r[what] for r in ranks]


def test_a_backward_pass_that_would_leave_each_rank_its_own_gradients_says_so(ranks: list[dict[str, Any]]) -> None:
    for said in (said for r in ranks for said in r["evaluated"]):
        assert len(said) == 2
        assert all("in evaluation mode gave 'weight' a gradient that is this rank's own" in one for one in said)


@pytest.mark.parametrize(("wire", "roundoff"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12)])
def test_sixteen_bits_on_the_wire_err_by_a_few_roundoffs_and_not_by_none(
    ranks: list[dict[str, Any]], wire: str, roundoff: float
) -> None:
    """Each of the three addends is rounded once, and each of the two partial sums once."""
    for rank in ranks:
        assert 0 < rank[wire] <= 5 * roundoff
        assert all(0 < off <= 5 * roundoff for off in rank[f"{wire} module"])


def test_gradients_that_float16_does_not_hold_are_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for said in (said for r in ranks for said in r["out of range"]):
        assert len(said) == 3
        assert all("float16 on the wire holds numbers from 6.1e-5 to 65504" in one and "bf16" in one for one in said)


def test_a_plan_that_cannot_be_used_is_refused_by_the_same_error_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    kinds, said = zip(*(r["refused"] for r in ranks), strict=True)
    assert set(kinds) == {"PlanError"}
    assert all("cannot use quantized" in one for one in said)


def test_dropout_differs_between_ranks_and_follows_the_seed(ranks: list[dict[str, Any]]) -> None:
    draws = [r["dropout"] for r in ranks]
    assert all(first == again != other for first, again, other in draws)
    assert len({first for first, _, _ in draws}) == 3


def test_autocast_is_near_float32_and_is_not_float32(ranks: list[dict[str, Any]]) -> None:
    for plain, cast in (r["autocast"] for r in ranks):
        assert plain != cast
        assert cast == pytest.approx(plain, rel=0.02)
