"""1-bit Adam on real ranks is 1-bit Adam as it is written down."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import load_checkpoint
from tests.gloo.one_bit_adam import CASES, everything
from tests.gloo.ranks import run_worlds
from tests.tiers import sizes

Worlds = dict[int, list[dict[str, Any]]]
LAST = 0.4687645610924319
"""The loss of step 60, on two ranks; 0.424 without compression."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("one_bit_adam"))


@pytest.fixture(scope="module")
def worlds(folder: str) -> Worlds:
    """By world size and rank."""
    return run_worlds(everything, dict.fromkeys(sizes(2, 3, also=(1, 4)), (folder,)))


@pytest.mark.parametrize("n", sizes(2, 3, also=(1, 4)))
@pytest.mark.parametrize("name", CASES)
def test_programs_do_what_the_algorithm_says(worlds: Worlds, name: str, n: int) -> None:
    of_ranks = [found["off"][name] for found in worlds[n]]
    assert max(off for off, _ in of_ranks) < 1e-10, of_ranks
    assert len({bits for _, bits in of_ranks}) == 1, "replicas differ, if only in their last bits"


def test_a_run_goes_on_from_what_it_has_saved(worlds: Worlds, folder: str) -> None:
    """Bit for bit on as many ranks; on others, with the same sums of residuals."""
    sums = [{k: v for k, v in found["saved"].items() if k != "off"} for found in worlds[2]]
    assert all(found["saved"]["off"] == 0 for found in worlds[2]) and sums[0] == sums[1] and any(sums[0].values())
    for found in worlds[3]:
        assert found["loaded"] == pytest.approx(sums[0], rel=1e-9, abs=1e-12)
    assert set(load_checkpoint(f"{folder}/saved")["state"]) == {"residual", "residual_of_sum"}


def test_it_learns(worlds: Worlds) -> None:
    exact, mine = (worlds[2][0]["losses"][name] for name in ("exact", "one_bit_adam"))
    assert mine[:10] == exact[:10]
    assert exact[0] - mine[-1] > 0.95 * (exact[0] - exact[-1])
    assert mine[-1] == pytest.approx(LAST, abs=1e-6)


def test_what_does_not_fit_is_refused_by_name(worlds: Worlds) -> None:
    for found in worlds[2]:
        said = found["refused"]
        for name in ("sgd", "amsgrad", "later amsgrad"):
            assert "the optimizer must be torch.optim.Adam or AdamW with amsgrad=False" in said[name]
        assert "say how many steps are exact with from_step, as in 'one_bit_adam+from_step=100'" in said["at once"]
        assert "has none of 'hidden.weight', nor of any other parameter of its group" in said["cleared"]


def test_an_element_without_variance_stays_and_is_named(worlds: Worlds) -> None:
    for found in worlds[2]:
        assert "8 element(s) have gradients now" in found["refused"]["late"]
        assert "the first in 'embed.weight'" in found["refused"]["late"]
        assert float(found["refused"]["row"]) < 1e-14
