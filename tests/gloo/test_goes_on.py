"""One method goes on from what another has left; and steps that leave parameters out."""

from __future__ import annotations

from pathlib import Path

from tests.gloo import goes_on
from tests.gloo.ranks import run_ranks


def test_methods_go_on_from_one_another(tmp_path: Path) -> None:
    ranks = run_ranks(2, goes_on.everything, str(tmp_path))
    for found in ranks:
        assert found["diloco+every=2 behind averages"] == 0
        assert found["ddp behind averages"] == 0
        assert found["diloco behind top_k"]["moved"] < 1, "residuals of gradients are none of parameters"
        assert found["renamed"] and found["slices apart"] == 0
        assert found["a loss's rows"]["equal"] and "spread over the ranks" in found["a loss's rows"]["said"]
        for strategy, moved in found["left out"].items():
            assert moved["frozen"] == (-1 if strategy in goes_on.KEPT else 0), strategy
            assert (moved["unused"] > 0) == (strategy in goes_on.KEPT), strategy
    for what, name in (("diloco behind top_k", "residual"), ("gather behind parts", "residual_of_sum")):
        (said,) = ranks[0][what]["said"]
        assert f"'state.{name}." in said, said
