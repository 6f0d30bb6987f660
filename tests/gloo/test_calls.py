"""Drop-in modules: ranks that call one unequally often are told, and frozen ones are as in one process."""

from __future__ import annotations

from tests.gloo import calls
from tests.gloo.ranks import run_ranks


def test_calls_of_drop_in_modules() -> None:
    ranks = run_ranks(2, calls.everything)
    for found in ranks:
        assert "equally often in a backward pass" in found["unequal"]["auto"]
        assert found["unequal"]["never"] == ranks[0]["unequal"]["never"]
        assert found["frozen"] < 1e-12
        assert found["without a shift"] < 1e-12
