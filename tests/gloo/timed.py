"""What the ranks of a job do to time a model, and what they find."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.runtime.operator_times import VARIABLE, OperatorTimes


class Meets(nn.Module):
    """Ranks exchange values within its passes, which none of them can run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return (y @ autopar.gather(y).T).square().mean()


def timed_by_all(rank: int, world_size: int, cache: str) -> list[Any]:
    """Of two programs of one model, one after the other: the loss of a step and the compute that is predicted; then
    the devices of the tables that are left, and whether the second program has changed any."""
    os.environ[VARIABLE] = cache
    found: list[Any] = []
    tables = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Meets()
        program = autopar.optimize(
            model,
            example_inputs=torch.randn(5, 6),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            strategy="ddp",
            measure_compute=True,
        )
        said = program.plan.prediction
        assert said is not None
        found.append((float(program.step(torch.randn(5, 6))), said.compute_s))
        tables.append({path.name: path.read_text() for path in Path(cache).iterdir()})
    devices = [OperatorTimes.loads(text).device for text in tables[0].values()]
    return [*found, devices, tables[0] == tables[1]]


def refused_by_rank_0(rank: int, world_size: int) -> str:
    """What the ranks hear where rank 0 fails as it plans."""
    model = nn.Linear(3, 3)
    other = autopar.Calibration(
        date="2026-11-21",
        hardware="none",
        versions={},
        cluster=autopar.ClusterSpec.local(5).fingerprint,
        backend="gloo",
    )
    try:
        autopar.optimize(model, example_inputs=torch.ones(2, 3), calibration=other, measure_compute=True)
    except autopar.AutoparError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"
