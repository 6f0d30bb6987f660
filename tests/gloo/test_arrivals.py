"""The drop-in module whose outputs are not all used: what no rank's loss reads is left as it is, as in one process."""

from __future__ import annotations

from tests.gloo.arrivals import everything
from tests.gloo.ranks import run_worlds


def test_parameters_that_no_rank_comes_to_have_no_gradient() -> None:
    """Else momentum and weight decay would move them."""
    for ranks in run_worlds(everything, {1: (), 2: ()}).values():
        assert all(max(found) <= 1e-12 for found in ranks)
