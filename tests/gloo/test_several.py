"""Several optimizers of one model, and several models in one job: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo.ranks import run_worlds
from tests.gloo.several import everything
from tests.tiers import sizes

Worlds = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder: Path = tmp_path_factory.mktemp("several")
    return run_worlds(everything, dict.fromkeys(sizes(2, also=(1, 3)), (str(folder),)))


@pytest.mark.parametrize("what", ["optimizers", "programs"])
def test_trains_as_one_process_would(worlds: Worlds, what: str) -> None:
    wrong = {(n, k): d for n, ranks in worlds.items() for found in ranks for k, d in found[what].items() if d > 1e-10}
    assert wrong == {}


def test_drop_in_modules_with_an_optimizer_each_are_as_in_one_process(worlds: Worlds) -> None:
    assert all(found["modules"] <= 1e-10 for ranks in worlds.values() for found in ranks)


def test_what_cannot_be_is_refused_by_name(worlds: Worlds) -> None:
    for found in worlds[2]:
        twice, left_out, spread = found["refused"]
        assert "are in optimizer 1 and in one before it" in twice
        assert "'critic.body.0.weight'" in left_out and 'unused_parameters="freeze"' in left_out
        assert "'critic.body.0.weight' holds no values" in spread and "gathered()" in spread


def test_the_connections_of_programs_that_nobody_holds_are_closed(worlds: Worlds) -> None:
    for found in (found for n, ranks in worlds.items() if n > 1 for found in ranks):
        assert len(set(found["connections"][1:])) == 1
