"""A rank that takes part in calibrations of the lab."""

from __future__ import annotations

from typing import Any

from autopar import ClusterSpec, calibrate
from benchmarks.interleaved import serve_requests


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One calibration: `{"cluster", "budget_s"}`."""
    found = calibrate(ClusterSpec.model_validate(request["cluster"]), time_budget_s=request["budget_s"])
    return found.model_dump(mode="json")


if __name__ == "__main__":
    serve_requests(lambda: answer)
