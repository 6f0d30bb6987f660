"""A scaled loss: as with DDP and a `GradScaler`, and where nothing overflows as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo.ranks import run_worlds
from tests.gloo.scaling import BROKEN, everything
from tests.tiers import sizes

Worlds = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder: Path = tmp_path_factory.mktemp("scaled")
    return run_worlds(everything, dict.fromkeys(sizes(2, also=(1, 3)), (str(folder),)))


@pytest.mark.parametrize("n", sizes(2, also=(1,)))
def test_trains_as_ddp_with_a_grad_scaler_and_skips_what_it_skips(worlds: Worlds, n: int) -> None:
    for found in worlds[n]:
        for case, one in found["beside"].items():
            assert one["apart"] <= 1e-6 and one["norms"] <= 1e-3, case
            assert all(mine == theirs for mine, theirs in one["scales"]), case
            assert one["skipped"][0] == 0 and BROKEN in one["skipped"] and len(one["skipped"]) < 8, case
            assert one["skipped"] == worlds[n][0]["beside"][case]["skipped"]


def test_uneven_ranks_are_as_one_process_without_a_scale(worlds: Worlds) -> None:
    assert all(found["uneven"] <= 1e-12 for ranks in worlds.values() for found in ranks)


def test_the_scale_is_in_checkpoints(worlds: Worlds) -> None:
    for found in worlds[2]:
        plain, *loaded = found["checkpoints"]
        assert plain == 0 and loaded == [0, True, 0, True]


def test_the_drop_in_module_takes_the_users_scaler(worlds: Worlds) -> None:
    assert all(found["drop-in"] <= 1e-6 for found in worlds[2])


def test_what_cannot_be_scaled_is_refused_by_name(worlds: Worlds) -> None:
    for found in worlds[2]:
        number, half, local = found["refused"]
        assert "loss_scale is 2.0, expected 'dynamic'" in number
        assert "parameter '0.weight' is float16" in half
        assert "groups that are 'local'" in local
