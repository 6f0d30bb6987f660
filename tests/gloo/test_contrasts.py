"""Losses that compare the samples of the global batch, by `autopar.gather`: as in one process, on uneven ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.contrasts import everything
from tests.gloo.ranks import run_worlds
from tests.tiers import sizes

Worlds = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return run_worlds(everything, dict.fromkeys(sizes(2, also=(1, 3)), ()))


def test_contrastive_losses_train_as_in_one_process(worlds: Worlds) -> None:
    for n, ranks in worlds.items():
        for found in ranks:
            assert {k: d for k, d in found["trained"].items() if d > 1e-10} == {}, n


def test_drop_in_modules_leave_the_gradients_of_one_process(worlds: Worlds) -> None:
    for found in (found for n, ranks in worlds.items() if n > 1 for found in ranks):
        assert found["modules"] and max(found["modules"]) < 1e-12


def test_what_cannot_be_gathered_is_refused(worlds: Worlds) -> None:
    for found in worlds[2]:
        micro_batches, outside = found["refused"]
        assert "several micro-batches cannot be compared" in micro_batches
        assert "works in the model or the loss of program.step" in outside
