"""PowerSGD on real ranks is PowerSGD as it is written down, and goes on from its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo import power_sgd
from tests.gloo.ranks import run_ranks, run_worlds
from tests.tiers import sizes

PINNED = 0.0210726632
"""The last loss of a tiny training on two ranks."""


def test_programs_do_what_the_definition_says_and_learn() -> None:
    for n, of_ranks in run_worlds(power_sgd.everything, dict.fromkeys(sizes(2, also=(1, 3, 4)), ())).items():
        for case in of_ranks[0].keys() - {"losses"}:
            off, bits = zip(*(found[case] for found in of_ranks), strict=True)
            assert max(off) < 1e-10, (n, case, off)
            assert all(b == bits[0] for b in bits), f"{case}: {n} ranks have different parameters"
        for found in of_ranks if n == 2 else ():
            first, exact, same, compressed = found["losses"]
            assert same == pytest.approx(first, rel=1e-12) and exact < first / 20
            assert compressed < first / 10
            assert compressed == pytest.approx(PINNED, abs=1e-6)


def test_what_is_saved_goes_on(tmp_path: Path) -> None:
    before = run_ranks(2, power_sgd.saved, str(tmp_path))
    assert max(found["off"] for found in before) < 1e-12
    assert any(before[0]["sums"].values())
    for found in run_ranks(3, power_sgd.loaded, str(tmp_path), 2):
        assert found["off"] < 1e-10
        for sums in found["sums"]:
            assert sums == pytest.approx(before[0]["sums"], rel=1e-10, abs=1e-14)
