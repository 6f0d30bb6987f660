"""What the test of sign compression runs on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import autopar
from autopar.runtime.program import Program
from autopar.strategies import register
from tests.extension.sign_compression import SignCompression
from tests.gloo.training import batch, net

FILE = "signs.pt"


def _program(rank: int, n: int) -> Program:
    register(SignCompression())
    model = net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    example, cluster = batch(0, rank), autopar.ClusterSpec.local(n)
    plan = autopar.plan(model, cluster, strategy="ddp", example_inputs=example, loss_fn=F.cross_entropy)
    groups = tuple(g.model_copy(update={"strategy": SignCompression.name}) for g in plan.groups)
    plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
    return autopar.optimize(model, plan=plan, optimizer=optimizer, example_inputs=example, loss_fn=F.cross_entropy)


def saved(rank: int, n: int, folder: str) -> dict[str, float]:
    """Some steps, and a checkpoint; returns the sum of the residuals, by parameter."""
    program = _program(rank, n)
    for step in range(3):
        program.step(batch(step, rank))
    state = program.state_dict()
    if rank == 0:
        torch.save(state, Path(folder) / FILE)
    program.save(Path(folder) / "disk")
    again = _program(rank, n)
    again.load(Path(folder) / "disk")
    program.step(batch(3, rank))
    again.step(batch(3, rank))
    alike = zip(program.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in alike), "not the run that was not interrupted"
    return _sums(state)


def loaded(rank: int, n: int, folder: str) -> dict[str, float]:
    """The same sum, on another number of ranks, before they go on."""
    program = _program(rank, n)
    program.load_state_dict(torch.load(Path(folder) / FILE, weights_only=True))
    found = _sums(program.state_dict())
    program.load(Path(folder) / "disk")
    assert _sums(program.state_dict()) == pytest.approx(found, rel=1e-6)
    program.step(batch(3, rank))
    return found


def _sums(state: dict[str, dict[str, dict[str, torch.Tensor]]]) -> dict[str, float]:
    return {name: float(value.double().abs().sum()) for name, value in state["state"]["residual"].items()}
