"""Compressed groups are equal to their definition, go on where they were saved, and learn."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import load_checkpoint
from tests.gloo.compressed import CASES, LEARNED, RESUMED, _sums, compared
from tests.gloo.ranks import run_worlds
from tests.tiers import sizes

Worlds = dict[int, list[dict[str, Any]]]
LAST_LOSS = {
    "int4, rotated": 0.0010120170686235062,
    "int8, stochastic": 0.0010253838560734293,
    "signs": 0.0006501681795737623,
    "qsgd": 0.0010133705509844605,
    "terngrad": 0.0009331890981346684,
}
"""Of trainings that draw nothing from PyTorch's own stream; 0.0010 without compression."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compressed"))


@pytest.fixture(scope="module")
def worlds(folder: str) -> Worlds:
    return run_worlds(compared, dict.fromkeys(sizes(2, 3, also=(1, 4)), (folder,)))


@pytest.mark.parametrize("n", sizes(2, 3, also=(1, 4)))
def test_ranks_train_as_the_definition_says(worlds: Worlds, n: int) -> None:
    for rank, found in enumerate(worlds[n]):
        distances = {k: v for k, v in found.items() if k not in ("resumed", "losses", "moved")}
        assert len(distances) == len(CASES) and max(distances.values()) < 1, (rank, distances)


def test_a_run_that_was_saved_goes_on_to_the_last_bit(worlds: Worlds) -> None:
    for found in worlds[2]:
        assert list(found["resumed"]) == list(RESUMED)
        for name, off in found["resumed"].items():
            assert off["parameters"] == 0 and off["sums"] < 1e-12, (name, off)


def test_on_other_ranks_the_sum_of_what_is_kept_is_the_same(worlds: Worlds, folder: str) -> None:
    saved = _sums(load_checkpoint(f"{folder}/int8"))
    for found in worlds[3]:
        assert found["moved"] == pytest.approx(saved, abs=1e-9) and any(abs(v) > 1e-9 for v in saved.values())


def test_a_tiny_training_learns(worlds: Worlds) -> None:
    losses = worlds[2][0]["losses"]
    for name in LEARNED:
        assert losses[name][-1] < 0.5 * losses[name][0], (name, losses[name])
    assert {name: losses[name][-1] for name in LEARNED} == pytest.approx(LAST_LOSS, rel=1e-6)
