"""Sparsification on ranks: what their tests run on each, against `chosen_chunks.Reference`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import VerificationError
from autopar.ops import sparsification
from autopar.runtime.program import Program
from autopar.spec.plan import Plan, SyncGroup
from tests.gloo.captures import traced_once
from tests.gloo.chosen_chunks import (
    CHUNK,
    DENSITY,
    METHODS,
    MOMENTUM,
    Case,
    Reference,
    cases,
    idle,
    parts,
    sgd,
    trained,
)
from tests.gloo.odd_chunks import odd, unused_later
from tests.gloo.training import batch

STEPS = 7
RAMP = {"ramp": 2, "ramp_steps": 2}
"""Of DGC: it is saved within the second stage."""


@cache
def plan_of(n: int) -> Plan:
    """In one group."""
    return autopar.plan(
        idle(),
        autopar.ClusterSpec.local(n),
        strategy="all_reduce_one_bucket",
        example_inputs=batch(0, 0),
        loss_fn=F.cross_entropy,
    )


def program_for(
    model: nn.Module,
    rank: int,
    n: int,
    method: str,
    optimizer: torch.optim.Optimizer,
    timing: Sequence[tuple[str, int]] = (),
    more: Mapping[str, int] = MappingProxyType({}),
    **settings: Any,
) -> Program:
    """Under two groups of a method."""
    options: dict[str, Any] = {} if method == "all_reduce" else {"density": DENSITY, "chunk": CHUNK}
    if method == "dgc":
        options |= {"momentum": MOMENTUM, **more}
    groups = tuple(
        SyncGroup.model_validate(
            {"strategy": method, "options": options, "members": [{"name": name} for name in names], **dict(timing)}
        )
        for names in parts(list(trained(model)))
    )
    plan = plan_of(n).model_copy(update={"groups": groups, "fidelity": "local"})
    example = batch(0, rank)
    found: Program = autopar.optimize(
        model, plan=plan, optimizer=optimizer, example_inputs=example, loss_fn=F.cross_entropy, **settings
    )
    return found


def off(rank: int, n: int, case: Case, **settings: Any) -> tuple[float, str]:
    """How far a program is from the reference, at most over some steps; and a hash of all bits of its parameters,
    behind each."""
    reference, model = Reference(n, case), idle()
    optimizer = case.optimizer(model)
    program = program_for(
        model,
        rank,
        n,
        case.method,
        optimizer,
        clip_grad_norm=case.max_norm,
        timing=case.timing,
        more=case.options,
        **settings,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    worst, bits = 0.0, hashlib.sha256()
    for step in range(STEPS):
        own = case.batches(step, rank)
        program.step(micro_batches=own) if case.micro else program.step(own[0])
        if case.schedules:
            scheduler.step()
        reference.step(step)
        pairs = zip(model.parameters(), reference.model.parameters(), strict=True)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
        for p in model.parameters():
            bits.update(p.detach().numpy().tobytes())
    return worst, bits.hexdigest()


def saved(rank: int, n: int, folder: str, method: str) -> dict[str, float]:
    """A run that is saved and loaded goes on to the last bit; returns the sums of its residuals."""
    model, other = idle(), idle()
    program = program_for(model, rank, n, method, sgd(model), more=RAMP)
    for step in range(3):
        program.step(batch(step, rank))
    program.save(Path(folder) / method)
    again = program_for(other, rank, n, method, sgd(other), more=RAMP)
    again.load(Path(folder) / method)
    state = program.state_dict()
    for step in range(3, 6):
        program.step(batch(step, rank))
        again.step(batch(step, rank))
    alike = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in alike), "not the run that was not interrupted"
    if rank == 0:
        torch.save(state, Path(folder) / f"{method}.pt")
    return _sums(state)


def loaded(rank: int, n: int, folder: str, method: str) -> dict[str, float]:
    """The same sums on another number of ranks, from a file and from a folder."""
    model = idle()
    program = program_for(model, rank, n, method, sgd(model))
    program.load_state_dict(torch.load(Path(folder) / f"{method}.pt", weights_only=True))
    found = _sums(program.state_dict())
    program.load(Path(folder) / method)
    assert _sums(program.state_dict()) == pytest.approx(found, rel=1e-12)
    program.step(batch(3, rank))
    return found


def _sums(state: dict[str, Any]) -> dict[str, float]:
    """Of each state and parameter, of all that it has, weighted so that no two places count alike."""
    found = {}
    for key, by_name in state["state"].items():
        for name, value in by_name.items():
            flat = value.double().reshape(-1)
            found[f"{key} {name}"] = float((flat * torch.arange(1, len(flat) + 1)).sum())
    return found


def losses(rank: int, n: int, method: str) -> list[float]:
    """The losses of 60 steps on the same batches."""
    model = idle()
    lr = 0.5 if method in ("all_reduce", "top_k", "random_k") else 0.5 * (1 - MOMENTUM)
    program = program_for(model, rank, n, method, sgd(model, lr))
    return [float(program.step(batch(step % 2, rank, 4))) for step in range(60)]


def wrong(rank: int, n: int) -> dict[str, str]:
    """What the proof says where a tenth too much is sent, where what is sent is kept as well, and where momentum is
    another than is said."""

    def more(*given: Any) -> torch.Tensor:
        return 1.1 * take(*given)

    def twice(state: torch.Tensor, *given: Any) -> torch.Tensor:
        return take(state.clone(), *given)

    def another(state: torch.Tensor, value: torch.Tensor, decay: float) -> torch.Tensor:
        return accumulate(state, value, decay if decay == 1 else decay + 0.1)

    said, inside = {}, vars(sparsification)
    take: Callable[..., torch.Tensor] = inside["take_chunks"]
    accumulate: Callable[..., torch.Tensor] = inside["accumulate"]
    faults = {"more": ("take_chunks", more), "twice": ("take_chunks", twice), "another": ("accumulate", another)}
    for fault, (name, function) in faults.items():
        for method in ("dgc",) if name == "accumulate" else ("top_k", "dgc"):
            model, inside[name] = idle(), function
            program = program_for(model, rank, n, method, sgd(model), check="always")
            for step in range(2):
                try:
                    program.step(batch(step, rank))
                except VerificationError as e:
                    said[f"{method}, {fault}"] = f"step {step}: {e}"
                    break
            inside.update(take_chunks=take, accumulate=accumulate)
    return said


@traced_once()
def everything(rank: int, n: int, folder: str) -> dict[str, Any]:
    """All of the above on this many ranks."""
    found: dict[str, Any] = {}
    for method in METHODS:
        for i, case in enumerate(cases(method, n)):
            found[f"{method} {i}"] = off(rank, n, case, check="always" if n == 2 else "first")
        if n == 2:
            found[f"saved {method}"] = saved(rank, n, folder, method)
        if n == 3:
            found[f"loaded {method}"] = loaded(rank, n, folder, method)
    if n == 2:
        found["wrong"] = wrong(rank, n)
        found["odd"] = [odd(rank, n, folder, method) for method in METHODS]
        found["unused"] = [unused_later(rank, n, method) for method in ("top_k", "random_k")]
        found["losses"] = {method: losses(rank, n, method) for method in ("all_reduce", *METHODS)}
    return found
