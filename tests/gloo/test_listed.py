"""Batches that list their samples, as detectors' images with a dict for each, on ranks that have more and fewer."""

from __future__ import annotations

import pytest

from tests.gloo.listed import everything
from tests.gloo.ranks import run_ranks

Found = dict[str, tuple[float, list[str]]]


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return [{k: tuple(v) for k, v in found.items()} for found in run_ranks(2, everything)]


@pytest.mark.parametrize("capture", ["always", "never"])
def test_a_mean_over_samples_counts_them_and_not_their_channels(ranks: list[Found], capture: str) -> None:
    for found in ranks:
        for mode in ("step", "module"):
            distance, said = found[f"mean over samples, {capture}, {mode}"]
            assert distance <= 1e-12 and said == []


@pytest.mark.parametrize("capture", ["always", "never"])
def test_a_sum_over_samples_is_taken_as_one(ranks: list[Found], capture: str) -> None:
    distance, (said,) = ranks[0][f"sum, {capture}, step"]
    assert distance <= 1e-12 and "is a sum over the batch" in said


def test_a_mean_over_objects_is_read_off_the_graph_and_said_where_there_is_none(ranks: list[Found]) -> None:
    distance, words = ranks[0]["mean over objects, always, step"]
    assert distance <= 1e-12 and words == []
    distance, (said,) = ranks[0]["mean over objects, never, step"]
    assert distance > 1e-4 and "on a batch of 3 samples it is" in said
