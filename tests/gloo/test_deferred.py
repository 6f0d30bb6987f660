"""Parameters that are on their way between two steps: whoever runs, saves or loads the model has them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, PlanError
from autopar.runtime.program import Program
from tests.gloo.ranks import run_ranks
from tests.gloo.training import Net, batch, distance, eager_step, joined, net, program_for

RANKS = 2


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def _trained(rank: int, n: int, steps: int = 2) -> tuple[Net, Program, Net, torch.optim.Optimizer]:
    """A model some steps on, whose parameters are on their way; the same in one process."""
    model, eager = net(), net()
    optimizer = _sgd(eager)
    program = program_for(model, rank, "zero1+late", optimizer=_sgd(model), late_parameters=True)
    for step in range(steps):
        program.step(batch(step, rank))
        eager_step(eager, optimizer, joined([batch(step, r) for r in range(n)]))
    return model, program, eager, optimizer


def _loaded_into(rank: int, n: int) -> float:
    """What is loaded is not overwritten by what was on its way."""
    model, program, eager, optimizer = _trained(rank, n)
    fresh = net()
    model.load_state_dict(fresh.state_dict())
    eager.load_state_dict(fresh.state_dict())
    program.step(batch(5, rank))
    eager_step(eager, optimizer, joined([batch(5, r) for r in range(n)]))
    program.synchronize()
    return distance(model, eager)


def _another_shape(rank: int, n: int) -> float:
    """One graph leaves parameters to another one, micro-batches between them."""
    model, program, eager, optimizer = _trained(rank, n)
    for step in range(2, 6):
        sizes = [4 + step, 2 + step]
        data = [[batch(10 * step + k, r, sizes[r]) for k in range(1 + step % 2)] for r in range(n)]
        program.step(micro_batches=data[rank])
        eager_step(eager, optimizer, joined([b for part in data for b in part]))
    program.synchronize()
    return distance(model, eager)


def _linear(model: nn.Module) -> nn.Linear:
    return next(m for m in model.modules() if isinstance(m, nn.Linear))


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(0.9),
    "other memory": lambda p: setattr(p, "data", p.detach().clone()),
}


def _written(rank: int, n: int, how: str) -> str:
    """What is said where parameters that are on their way are written to; once they have come, nothing is."""
    model, program, _, _ = _trained(rank, n)
    for comes_before in (True, False):
        if comes_before:
            program.synchronize()
        with torch.no_grad():
            for p in model.parameters():
                WRITES[how](p)
        try:
            program.step(batch(7, rank))
        except PlanError as e:
            return str(e)
    return ""


def everything(rank: int, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, program, eager, _ = _trained(rank, n)
    found["before"] = distance(model, eager)
    program.synchronize()
    found["synchronized"] = distance(model, eager)

    model, _, eager, _ = _trained(rank, n)
    ids = batch(9, 0)[0]
    found["run"] = float((model(ids) - eager(ids)).detach().abs().max())

    model, _, eager, _ = _trained(rank, n)
    state, expected = model.state_dict(), eager.state_dict()
    found["saved"] = max(float((state[k] - expected[k]).abs().max()) for k in expected)

    model, _, eager, _ = _trained(rank, n)
    found["copied"] = distance(copy.deepcopy(model), eager)

    model, _, eager, _ = _trained(rank, n)
    torch.save(model, file := io.BytesIO())
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    found["pickled"] = distance(read, eager)
    assert not any(m._forward_pre_hooks or m._state_dict_pre_hooks for m in read.modules())

    for name, _ in net().named_children():
        model, _, eager, _ = _trained(rank, n)
        kept, expected = model.get_submodule(name).state_dict(), eager.get_submodule(name).state_dict()
        found[f"saved, {name}"] = max([float((kept[k] - expected[k]).abs().max()) for k in expected], default=0.0)

    model, _, eager, _ = _trained(rank, n)
    part, theirs = _linear(model), _linear(eager)
    x = torch.ones(2, part.in_features, dtype=torch.float64)
    found["part run"] = float((part(x) - theirs(x)).detach().abs().max())

    found["written"] = [_written(rank, n, how) for how in WRITES]

    model, program, eager, _ = _trained(rank, n)
    whole, expected = program.state_dict()["model"], eager.state_dict()
    found["checkpoint"] = max(float((whole[k] - expected[k]).abs().max()) for k in expected)
    found["loaded"] = _loaded_into(rank, n)
    found["another shape"] = _another_shape(rank, n)

    try:
        program_for(net(), rank, "zero1+late")
    except AutoparError as e:
        found["refused"] = str(e)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything)


def test_they_are_late(ranks: list[dict[str, Any]]) -> None:
    """Behind a step, a rank has its own part of the new parameters, and the others' of the old ones."""
    assert all(r["before"] > 1e-6 for r in ranks)


@pytest.mark.parametrize(
    "what", ["synchronized", "run", "saved", "checkpoint", "loaded", "another shape", "copied", "pickled", "part run"]
)
def test_whoever_uses_the_model_has_them(ranks: list[dict[str, Any]], what: str) -> None:
    assert all(r[what] <= 1e-12 for r in ranks), [r[what] for r in ranks]


def test_parts_of_the_model_are_saved_with_them(ranks: list[dict[str, Any]]) -> None:
    parts = [off for r in ranks for what, off in r.items() if what.startswith("saved, ")]
    assert len(parts) > 2 and max(parts) <= 1e-12


def test_what_is_written_to_them_is_refused_rather_than_lost(ranks: list[dict[str, Any]]) -> None:
    said = [one for r in ranks for one in r["written"]]
    assert all("was written to while its updated values were on their way" in one for one in said), said


def test_only_who_has_asked_for_it_gets_such_plans(ranks: list[dict[str, Any]]) -> None:
    assert all("late_parameters=True" in r["refused"] for r in ranks)
