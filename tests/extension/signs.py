"""What the tests of strategies with state run on each rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autopar
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.layouts import Owned
from autopar.ops.sparsification import Accumulate
from autopar.ops.state import Recall
from autopar.runtime.program import Program
from autopar.spec.plan import Fidelity
from autopar.strategies import register
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter
from tests.extension.sign_compression import SignCompression
from tests.gloo.plans import ddp_plan
from tests.gloo.training import batch, net

FILE = "signs.pt"


class Remembered(Strategy):
    """One rank sums gradients, and keeps the sum."""

    name = "remembered"
    summary = "an owner sums, and keeps the sum"

    def fidelity(self, options: Options) -> Fidelity:
        return "compressed"

    def applies(self, member: Member, context: Context) -> str | None:
        return None

    def options(self, context: Context) -> Sequence[Options]:
        return [Options()]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        state = emit.state(group, "sum", layout=Owned(1))
        total = emit.wait(emit.reduce(emit.pack(group), owner=1))
        emit.update(emit.wait(emit.broadcast(total)), group)
        emit.keep(state, total)


class Begins(Remembered):
    """Has a momentum of its own in its first steps, and none behind them."""

    name = "begins"
    summary = "sum a momentum of each rank's own in the first steps, and gradients from then on"
    warms_up = True

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        gradients = emit.pack(group)
        if group.moment.doing == "plain":
            momentum = emit.state(group, "momentum", momentum=0.9)
            gradients = emit.emit(
                Recall(group.dtype), group, [emit.emit(Accumulate(0.9), group, [momentum, gradients])]
            )
        emit.update(emit.wait(emit.all_reduce(gradients)), group)


def _program(rank: int, n: int, strategy: Strategy, **settings: Any) -> Program:
    register(strategy)
    model = net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    example = batch(0, rank)
    plan = ddp_plan(model, n, example)
    groups = tuple(g.model_copy(update={"strategy": strategy.name, **settings}) for g in plan.groups)
    plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
    return autopar.optimize(model, plan=plan, optimizer=optimizer, example_inputs=example, loss_fn=F.cross_entropy)


def saved(rank: int, n: int, folder: str) -> dict[str, float]:
    """Some steps, and a checkpoint; returns the sum of the residuals, by parameter."""
    program = _program(rank, n, SignCompression())
    for step in range(3):
        program.step(batch(step, rank))
    state = program.state_dict()
    if rank == 0:
        torch.save(state, Path(folder) / FILE)
    program.save(Path(folder) / "disk")
    again = _program(rank, n, SignCompression())
    again.load(Path(folder) / "disk")
    program.step(batch(3, rank))
    again.step(batch(3, rank))
    alike = zip(program.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in alike), "not the run that was not interrupted"
    _save_what_one_rank_keeps(rank, n, Path(folder) / "owned")
    return _sums(state)


def _save_what_one_rank_keeps(rank: int, n: int, folder: Path) -> None:
    program = _program(rank, n, Remembered())
    program.step(batch(0, rank))
    state = program.state_dict()["state"]["sum"]
    program.save(folder)
    there = autopar.load_checkpoint(folder)["state"]["sum"]
    assert any(value.any() for value in state.values())
    assert there.keys() == state.keys() and all(torch.equal(there[name], value) for name, value in state.items())


def loaded(rank: int, n: int, folder: str) -> dict[str, float]:
    """The same sum, on another number of ranks, before they go on."""
    program = _program(rank, n, SignCompression())
    program.load_state_dict(torch.load(Path(folder) / FILE, weights_only=True))
    found = _sums(program.state_dict())
    program.load(Path(folder) / "disk")
    assert _sums(program.state_dict()) == pytest.approx(found, rel=1e-6)
    program.step(batch(3, rank))
    return found


def asked_later(rank: int, n: int, folder: str) -> dict[str, float]:
    """How far parameters are from those of the run that was not interrupted, where the steps behind a checkpoint ask
    for a state that no step of a new program has asked for: the checkpoint is a folder, or a dict."""
    program = _program(rank, n, Begins(), from_step=4)
    for step in range(2):
        program.step(batch(step, rank))
    program.save(Path(folder) / "later")
    state = program.state_dict()
    again = {kind: _program(rank, n, Begins(), from_step=4) for kind in ("folder", "dict")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)  # which says that it is lost
        again["folder"].load(Path(folder) / "later")
        again["dict"].load_state_dict(state)
    for step in range(2, 6):
        for one in (program, *again.values()):
            one.step(batch(step, rank))
    first = list(program.model.parameters())
    return {
        kind: max(float((a - b).detach().abs().max()) for a, b in zip(first, one.model.parameters(), strict=True))
        for kind, one in again.items()
    }


def _sums(state: dict[str, dict[str, dict[str, torch.Tensor]]]) -> dict[str, float]:
    return {name: float(value.double().abs().sum()) for name, value in state["state"]["residual"].items()}
