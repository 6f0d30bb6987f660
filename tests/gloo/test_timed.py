"""Compute is timed on all ranks at once, as it runs in training."""

from __future__ import annotations

from pathlib import Path

from tests.gloo.ranks import run_ranks
from tests.gloo.timed import refused_by_rank_0, timed_by_all


def test_a_model_is_timed_by_all_ranks_at_once(tmp_path: Path) -> None:
    """Rank 0 alone would wait for the others within the model's passes, and be too fast where ranks share cores."""
    for first, second, devices, is_kept in run_ranks(2, timed_by_all, str(tmp_path)):
        assert first[0] == second[0] and 0 < first[1] < 10
        assert 0 < second[1] < 10
        assert all(", 2 ranks at once" in device for device in devices) and len(devices) == 1
        assert is_kept, "what is known is not timed again"


def test_all_ranks_hear_why_rank_0_has_no_plan() -> None:
    first, second = run_ranks(2, refused_by_rank_0)
    assert first.startswith("SpecError: the calibration was taken on another cluster")
    assert second.startswith("SpecError: rank 0: the calibration was taken on another cluster")
