"""Workloads for the tests of the pool: a small model, and what can go wrong with its batches."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

BAD_RANK, BAD_STEP = 1, 2
WIDTH = 400


def _stumble(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError("the data ran out")
    if how == "hangs":
        time.sleep(3600)


def workload(how: str = "well") -> SimpleNamespace:
    """A model whose batches stumble on one rank, from one step on; or whose parameters differ there."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        width = WIDTH + (how == "differs" and os.environ.get("RANK") == str(BAD_RANK))
        return nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH))

    def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rank == BAD_RANK and step == BAD_STEP:
            _stumble(how)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs, targets = torch.randn(2, 4, WIDTH, generator=generator)
        return inputs, targets

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.SGD(m.parameters(), lr=0.01)  # noqa: E731
    return SimpleNamespace(model=model, batch=batch, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
