"""DiLoCo on real ranks is DiLoCo as it is written down, and goes on from its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo import diloco
from tests.gloo.ranks import run_ranks, run_worlds
from tests.tiers import sizes

PINNED = 0.0112483160
"""The last loss of a tiny training on two ranks."""


def test_programs_do_what_the_definition_says_and_learn() -> None:
    for n, of_ranks in run_worlds(diloco.everything, dict.fromkeys(sizes(2, also=(1, 3, 4)), ())).items():
        for case in of_ranks[0].keys() & (diloco.CASES.keys() | diloco.NARROW.keys()):
            off, bits = zip(*(found[case] for found in of_ranks), strict=True)
            assert max(off) < 1e-10, (n, case, off)
            assert all(b == bits[0] for b in bits), f"{case}: {n} ranks have different parameters"
        for found in of_ranks if n == 2 else ():
            first, exact, same, local = found["losses"]
            assert same == pytest.approx(first, rel=1e-12) and local < first / 20 and local < exact
            assert local == pytest.approx(PINNED, abs=1e-6)
            assert found["local SGD"] < 1e-13
            assert found["half"] < 1e-6


def test_what_is_saved_goes_on(tmp_path: Path) -> None:
    before = run_ranks(2, diloco.saved, str(tmp_path))
    for found in before:
        assert found["whole"]["off"] < 1e-10 and found["begun"] < 1e-10, found
    kept = before[0]["narrow"]["sums"]
    assert any(value for key, value in kept.items() if "residual" in key)
    for found in run_ranks(3, diloco.loaded, str(tmp_path)):
        for case, sums in found.items():
            assert sums == pytest.approx(before[0][case.split(",")[0]]["sums"], rel=1e-10, abs=1e-12), case
