"""What the tests of checkpoints run on each rank: saved, loaded and refused, with dropout and batch norm."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import autopar
from autopar.errors import CollectiveError, SpecError
from autopar.runtime.program import Program
from autopar.runtime.random import RandomStream


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)


def program_for(rank: int, strategy: str = "zero1", timeout_s: float = 60.0, **settings: Any) -> Program:
    model = net()
    torch.manual_seed(11)
    program: Program = autopar.optimize(
        model,
        example_inputs=batch(0, rank),
        loss_fn=F.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        strategy=strategy,
        timeout_s=timeout_s,
        **settings,
    )
    return program


def trained(program: Program, steps: range) -> list[float]:
    return [float(program.step(batch(step, program.rank))) for step in steps]


def through_bytes(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether two checkpoints hold the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def masks(program: Program) -> list[float]:
    """The first numbers of the program's stream."""
    with program._random:
        return torch.rand(3).tolist()


def refusal(program: Program, state: Any) -> tuple[str, bool]:
    """What is said of a state, and whether everything stays as it was."""
    before = copy.deepcopy(program.state_dict())
    try:
        program.load_state_dict(state)
    except SpecError as e:
        return str(e), same(program.state_dict(), before)
    return "", False


def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    program = program_for(rank)
    start = copy.deepcopy(program.state_dict())
    first = trained(program, range(2))
    state = through_bytes(program.state_dict())
    losses = trained(program, range(2, 4))
    final = copy.deepcopy(program.state_dict())

    again = program_for(rank, "PS")
    again.load_state_dict(state)
    resumed, model = trained(again, range(2, 4)), again.state_dict()["model"]
    # Slices of a parameter and a whole one may be updated by other instructions, which round otherwise.
    found["resumed"] = torch.allclose(torch.tensor(resumed), torch.tensor(losses), rtol=1e-6, atol=0) and all(
        torch.allclose(model[n].double(), value.double(), rtol=0, atol=1e-6) for n, value in final["model"].items()
    )

    program.load_state_dict(start)  # whose moments are placeholders
    found["back to the start"] = trained(program, range(2)) == first

    save(state, checkpoint_id=Path(folder))
    loaded = program_for(rank)
    into = loaded.state_dict()
    load(into, checkpoint_id=Path(folder))
    loaded.load_state_dict(into)
    found["dcp"] = trained(loaded, range(2, 4)) == losses and same(loaded.state_dict(), final)

    found["dcp, delayed"] = [_delayed(rank, f"{folder}-{steps}", steps) for steps in (0, 1)]

    # As autopar wrote it before it kept every rank's stream, and from three ranks.
    old = {**state, "random": [torch.Generator().manual_seed(0).get_state()]}
    three = {**state, "random": [*state["random"], RandomStream(2, 3, seed=5).state()]}
    for name, one in (
        ("old", old),
        ("three", three),
        ("twice the same", {**state, "random": [state["random"][0]] * 2}),
    ):
        loaded.load_state_dict(one)
        found[f"masks, {name}"] = masks(loaded)

    wrong = copy.deepcopy(state)
    wrong["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    found["refused by one"] = refusal(loaded, wrong if rank == 1 else state)
    other = copy.deepcopy(state)
    other["model"]["0.weight"][0, 0] += rank
    found["given different ones"] = refusal(loaded, other)

    found["alone"] = _alone(program, again)
    return found


def _delayed(rank: int, folder: str, steps: int) -> tuple[bool, bool]:
    """Whether a training whose gradients come a step late goes on from `torch.distributed.checkpoint` as if it had not
    been interrupted, and whether it is said that gradients are lost. `steps`: taken before what is loaded into."""
    program = program_for(rank, "ddp+delay=1", fidelity="stale")
    trained(program, range(2))
    save(program.state_dict(), checkpoint_id=Path(folder))
    losses = trained(program, range(2, 5))
    loaded = program_for(rank, "ddp+delay=1", fidelity="stale")
    trained(loaded, range(steps))
    into = loaded.state_dict()
    load(into, checkpoint_id=Path(folder))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded.load_state_dict(into)
    return trained(loaded, range(2, 5)) == losses, any("held_0_of_1" in str(w.message) for w in said)


def _alone(loading: Program, stepping: Program) -> dict[str, str]:
    """What rank 0 is told where it calls `state_dict` alone: while the other one steps, loads, and does nothing."""
    said = {}
    rank = loading.rank
    if rank == 0:
        said["steps"] = _told(stepping)
    trained(stepping, range(1))  # so that the other one's step, which waits, ends
    state = through_bytes(net().state_dict())
    try:
        loading.state_dict() if rank == 0 else loading.load_state_dict(state)
    except CollectiveError as e:
        said["loads"] = str(e)
    idle = program_for(rank, timeout_s=2.0)
    if rank == 0:
        said["idle"] = _told(idle)
    return said


def _told(program: Program) -> str:
    try:
        program.state_dict()
    except CollectiveError as e:
        return str(e)
    return ""
