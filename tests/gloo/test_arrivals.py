"""The drop-in module whose outputs are not all used: what no rank's loss reads is left as it is, as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.arrivals import everything
from tests.gloo.ranks import run_worlds


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[Any]]:
    return run_worlds(everything, {1: (), 2: ()})


def test_parameters_that_no_rank_comes_to_have_no_gradient(worlds: dict[int, list[Any]]) -> None:
    """Else momentum and weight decay would move them."""
    assert all(max(apart) <= 1e-12 for ranks in worlds.values() for apart, _ in ranks)


def test_outputs_that_ranks_do_not_foresee_are_all_to_be_used(worlds: dict[int, list[Any]]) -> None:
    assert worlds[1][0][1] == ""
    assert all("comes to parameter 'trunk.weight' and not to 'b.weight'" in said for _, said in worlds[2])
