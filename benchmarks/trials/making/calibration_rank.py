"""A rank that takes part in calibrations of the lab."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar import ClusterSpec, calibrate
from autopar.lab import serve


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One calibration: `{"cluster", "budget_s"}`."""
    found = calibrate(ClusterSpec.model_validate(request["cluster"]), time_budget_s=request["budget_s"])
    return found.model_dump(mode="json")


def main() -> None:
    """Answers until nobody asks any more."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
