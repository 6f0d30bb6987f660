"""Top-k, random-k and DGC are what their definitions say, on one rank to four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.gloo.chosen_chunks import METHODS, cases
from tests.gloo.ranks import run_worlds
from tests.gloo.sparsified import everything
from tests.tiers import sizes

LAST = {"top_k": 0.44111524, "random_k": 0.61872655, "dgc": 0.46183245}
"""The loss of step 60, on two ranks."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By world size and rank; in one start of four processes."""
    folder = str(tmp_path_factory.mktemp("sparsified"))
    return run_worlds(everything, dict.fromkeys(sizes(2, 3, also=(1, 4)), (folder,)))


@pytest.mark.parametrize("n", sizes(2, 3, also=(1, 4)))
@pytest.mark.parametrize("method", METHODS)
def test_programs_do_what_the_algorithm_says(method: str, n: int, found: Mapping[int, list[dict[str, Any]]]) -> None:
    for i, case in enumerate(cases(method, n)):
        of_ranks = [of_rank[f"{method} {i}"] for of_rank in found[n]]
        assert max(off for off, _ in of_ranks) < 1e-10, (case, of_ranks)
        assert len({bits for _, bits in of_ranks}) == 1, "replicas differ, if only in their last bits"


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_from_what_it_has_saved(method: str, found: Mapping[int, list[dict[str, Any]]]) -> None:
    """Bit for bit on as many ranks, which the ranks have looked at; on others, with the same sums."""
    before = found[2][0][f"saved {method}"]
    assert before == found[2][1][f"saved {method}"] and any(before.values())
    for of_rank in found[3]:
        assert of_rank[f"loaded {method}"] == pytest.approx(before, rel=1e-9, abs=1e-12)


def test_odd_parameters(found: Mapping[int, list[dict[str, Any]]]) -> None:
    assert found[2][0]["odd"] == found[2][1]["odd"]


def test_what_is_kept_arrives_where_a_step_has_no_gradient(found: Mapping[int, list[dict[str, Any]]]) -> None:
    for of_rank in found[2]:
        assert max(of_rank["unused"]) < 1e-12


def test_faults_are_found(found: Mapping[int, list[dict[str, Any]]]) -> None:
    for of_rank in found[2]:
        said = of_rank["wrong"]
        assert said.keys() == {"top_k, more", "dgc, more", "top_k, twice", "dgc, twice", "dgc, another"}, said
        assert all("what is updated with and kept of" in text for text in said.values()), said
        assert all(text.startswith(f"step {int('another' in name)}") for name, text in said.items()), said


@pytest.mark.parametrize("method", METHODS)
def test_it_learns(method: str, found: Mapping[int, list[dict[str, Any]]]) -> None:
    of_rank = found[2][0]["losses"]
    exact, mine = of_rank["all_reduce"], of_rank[method]
    assert mine[0] == pytest.approx(exact[0], abs=1e-12)
    assert exact[0] - mine[-1] > 0.9 * (exact[0] - exact[-1])
    assert mine[-1] == pytest.approx(LAST[method], abs=1e-6)
