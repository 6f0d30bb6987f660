"""Checkpoints of one method that another goes on from, and parameters that a step leaves out, on several ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.program import Program

KEPT = ("quantized", "power_sgd")
SENT_WHOLE = ("ddp", "qsgd", "terngrad", "quantized(rounding=stochastic)")


class Parts(nn.Module):
    """A layer that is always used, one that is not, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)
        self.none = nn.Parameter(torch.zeros(0, 6))
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(self.always(x)) + self.none.sum()
        return found + self.sometimes(x) if self.uses else found


def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{s} behind averages": _begins_anew(rank, folder, s) for s in ("diloco+every=2", "ddp")}
    found["diloco behind top_k"] = _behind(rank, folder, "top_k", "diloco(wire=int8)+every=4")
    found["gather behind parts"] = _behind(rank, folder, "scaled_sign(exchange=parts)", "scaled_sign")
    found["left out"] = {strategy: _left_out(rank, strategy) for strategy in (*SENT_WHOLE, *KEPT)}
    return found


def _program(model: nn.Module, strategy: str, rank: int, **settings: Any) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if strategy.startswith("top_k"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autopar.optimize(
        model,
        example_inputs=_data(0, rank),
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        strategy=strategy,
        fidelity="local",
        **settings,
    )


def _data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=draw), torch.randn(4, 6, generator=draw)


def _begins_anew(rank: int, folder: str, strategy: str) -> float:
    """How far ranks are apart where all begin anew behind a checkpoint of replicas that were apart: at the end of a
    period, or behind a step that synchronizes exactly."""
    before = _program(Parts(), "ddp+every=4", rank)
    for step in range(6):
        before.step(_data(step, rank))
    before.save(Path(folder) / "averages")
    model = Parts()
    after = _program(model, strategy, rank)
    after.load(Path(folder) / "averages")
    for step in range(2):
        after.step(_data(20 + step, rank))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    all_ranks = [torch.zeros_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, flat)
    return max(float((one - flat).abs().max()) for one in all_ranks)


def _behind(rank: int, folder: str, first: str, then: str) -> dict[str, Any]:
    """How far a period moves parameters behind a checkpoint of another method, and what is said of what it had kept."""
    before = _program(Parts(), first, rank)
    for step in range(20):
        before.step(_data(step, rank))
    before.save(Path(folder) / "kept")
    model = Parts()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        after = _program(model, then, rank)
        after.load(Path(folder) / "kept")
    held = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        after.step(_data(20 + step, rank))
    moved = sum(float((p.detach() - h).square().sum()) for p, h in zip(model.parameters(), held, strict=True)) ** 0.5
    return {"moved": moved, "said": [str(w.message) for w in said if "does not keep" in str(w.message)]}


def _left_out(rank: int, strategy: str) -> dict[str, float]:
    """How far parameters move that no rank uses, and that are frozen for a while, in a model that runs eagerly."""
    model = Parts()
    program = _program(model, strategy, rank, capture="never")
    for step in range(3):
        program.step(_data(step, rank))
    found = {}
    for name in ("unused", "frozen"):
        model.uses = name == "frozen"
        model.sometimes.weight.requires_grad_(name != "frozen")
        before = model.sometimes.weight.detach().clone()
        for step in range(3):
            program.step(_data(step, rank))
        found[name] = float((model.sometimes.weight.detach() - before).abs().max())
    return found
