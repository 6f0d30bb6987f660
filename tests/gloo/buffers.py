"""Buffers that a forward pass reads and writes, of ranks that run different graphs; and constants in 16 bits."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import PlanMismatchError
from autopar.runtime.program import Program


class Banks(nn.Module):
    """Keeps a mean for each of two kinds of batches, but none of small ones."""

    first: torch.Tensor
    second: torch.Tensor
    rates: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.zeros(3))
        self.register_buffer("rates", torch.logspace(0, -3, 33).to(torch.bfloat16))

    def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x)
        mean = self.first if kind == 0 else self.second
        found = scores - mean.clone()
        if len(x) > 2:
            with torch.no_grad():
                mean.mul_(0.9).add_(scores.detach().mean(0), alpha=0.1)
        return found.square().mean()


def everything(rank: int, n: int) -> dict[str, Any]:
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    return {
        "step": _step(rank, n),
        "micro-batches": _micro_batches(rank, n),
        "drop-in": _drop_in(rank, n),
        "constants": _constants(rank),
        "averages": _averages(rank),
        "read late": _read_late(rank),
        "other states": _other_states(rank),
    }


def _batches(n: int) -> list[list[dict[str, Any]]]:
    """By step and rank: ranks have the same kinds, different ones, and batches that are too small."""
    draw = torch.Generator().manual_seed(3)
    kinds = [[0] * n, [1] * n, [r % 2 for r in range(n)], [0] * n, [0] * n]
    sizes = [[4] * n, [4] * n, [4] * n, [4 - 2 * (r % 2) for r in range(n)], [2 + 2 * (r % 2) for r in range(n)]]
    return [
        [{"x": torch.randn(s, 4, generator=draw) + r, "kind": k} for r, (k, s) in enumerate(zip(*of, strict=True))]
        for of in zip(kinds, sizes, strict=True)
    ]


def _program(model: nn.Module, rank: int, n: int, optimizer: torch.optim.Optimizer | None = None) -> Program:
    found: Program = autopar.optimize(
        model,
        example_inputs=_batches(n)[0][rank],
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
        strategy="ddp",
        timeout_s=60,
    )
    return found


def _step(rank: int, n: int) -> list[list[float]]:
    model, found = Banks(), list[list[float]]()
    program = _program(model, rank, n)
    for batches in _batches(n):
        program.step(batches[rank])
        found.append([*model.first.tolist(), *model.second.tolist()])
    return found


def _micro_batches(rank: int, n: int) -> list[float]:
    """The last micro-batch's graph writes no buffer."""
    model = Banks()
    program = _program(model, rank, n)
    batches = _batches(n)
    small = {"x": batches[4][0]["x"][:2], "kind": 0}
    program.step(micro_batches=[batches[0][rank], small])
    return list(model.first.tolist())


def _drop_in(rank: int, n: int) -> list[list[float]]:
    model, found = Banks(), list[list[float]]()
    module: Any = autopar.optimize(model, example_inputs=_batches(n)[0][rank], timeout_s=60)
    for batches in _batches(n):
        module(**batches[rank]).backward()
        found.append([*model.first.tolist(), *model.second.tolist()])
    return found


def _constants(rank: int) -> bool:
    """Whether constants in 16 bits are what they were behind an average over three ranks."""
    n = torch.distributed.get_world_size()
    model = Banks()
    before = model.rates.clone()
    program = _program(model, rank, n)
    program.step(_batches(n)[0][rank])
    program.synchronize_buffers()
    return bool(torch.equal(before, model.rates))


def _other_states(rank: int) -> str:
    """What is said where rank 0 alone was given a state of the optimizer."""
    n, model = torch.distributed.get_world_size(), Banks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if rank == 0:
        model(**_batches(1)[0][0]).backward()
        optimizer.step()
        model.load_state_dict(Banks().state_dict())
        optimizer.zero_grad()
    program = _program(model, rank, n, optimizer)
    try:
        program.step(_batches(n)[0][rank])
    except PlanMismatchError as e:
        return str(e)
    return "nothing"


def _averages(rank: int) -> float:
    """How far equal replicas in 16 bits are moved by an average."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(33, 7), nn.Linear(7, 5)).bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    batch = torch.randn(3, 33).bfloat16(), torch.randn(3, 5).bfloat16()
    program: Program = autopar.optimize(
        model,
        example_inputs=batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        strategy="ddp+every=2",
        fidelity="local",
    )
    for _ in range(4):
        program.step(batch)
    return max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))


class OwnNorm(nn.Module):
    """Normalizes by the batch in training, and by what it has seen else."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(mean, 0.3)
        else:
            mean = self.seen.clone()
        found: torch.Tensor = self.layer(x - mean).square().mean()
        return found


def _read_late(rank: int) -> tuple[list[float], list[str]]:
    """What ranks have of a buffer behind the first step that reads it, and what was said."""
    model = OwnNorm()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", autopar.AutoparWarning)
        program: Program = autopar.optimize(
            model,
            example_inputs=torch.randn(4, 4),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            strategy="ddp",
        )
        for training in (True, True, False):
            model.train(training)
            program.step(torch.randn(4, 4) + rank)
    return model.seen.tolist(), [str(w.message) for w in said if "only written so far" in str(w.message)]
