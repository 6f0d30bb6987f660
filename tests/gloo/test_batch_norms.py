"""Batch normalization over the global batch of uneven ranks: as in one process, also evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.batch_norms import everything
from tests.gloo.ranks import run_worlds
from tests.tiers import sizes

Worlds = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return run_worlds(everything, dict.fromkeys(sizes(2, also=(1, 3)), ()))


def test_trains_and_evaluates_as_one_process_would(worlds: Worlds) -> None:
    for n, ranks in worlds.items():
        for found in ranks:
            assert {k: d for k, d in found["trained"].items() if max(d) > 1e-10} == {}, n


def test_drop_in_modules_leave_the_gradients_of_one_process(worlds: Worlds) -> None:
    for found in (found for n, ranks in worlds.items() if n > 1 for found in ranks):
        assert found["modules"] and max(found["modules"]) < 1e-12


def test_layers_that_are_frozen_midway_have_the_statistics_of_rank_0_on_all_ranks(worlds: Worlds) -> None:
    for rank, found in enumerate(worlds[2]):
        assert len(found["frozen"]) == 4
        told = [1, 1] if rank == 0 else [0, 0]
        assert {k: v for k, v in found["frozen"].items() if not v[0] < 1e-10 or [*v[1:]] != told} == {}


def test_a_rank_that_evaluates_with_statistics_of_its_own_is_told_once(worlds: Worlds) -> None:
    assert [found["alone"] for found in worlds[2]] == [[0, 0, 0], [1, 0, 0]]


def test_nothing_is_said_of_the_loss_of_a_model_that_ends_with_it(worlds: Worlds) -> None:
    assert [found["ends with it"] for found in worlds[2]] == [[], []]


def test_what_cannot_be_synchronized_is_refused(worlds: Worlds) -> None:
    for found in worlds[2]:
        narrow_module, eager_module, narrow = found["refused"]
        assert "one of whose outputs is in 16 bits" in narrow_module
        assert "needs a graph in a drop-in module" in eager_module
        assert "whose loss is in 16 bits" in narrow
