"""Sparsification of odd parameters, and of parameters that not each step has a gradient of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.spec.plan import SyncGroup
from tests.gloo.chosen_chunks import CHUNK
from tests.gloo.training import batch


class Sometimes(nn.Module):
    """With a part that is used as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.always, self.once = nn.Linear(6, 6), nn.Linear(6, 6)
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.always(x)
        return found + self.once(x) if self.uses else found


def unused_later(rank: int, n: int, method: str) -> float:
    """How far what is kept of gradients that came once is from arriving, of a model that runs eagerly: what all ranks
    have moved by, and keep, is the first gradient."""
    model, eager = Sometimes().double(), Sometimes().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    draws = [torch.Generator().manual_seed(r) for r in range(n)]
    data = [torch.randn(4, 6, generator=draw, dtype=torch.float64) for draw in draws]
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(n),
        strategy=method,
        fidelity="compressed",
        example_inputs=(data[rank], data[rank]),
        loss_fn=F.mse_loss,
        capture="never",
    )
    options = {"density": 0.2, "chunk": CHUNK}
    plan = plan.model_copy(update={"groups": tuple(g.model_copy(update={"options": options}) for g in plan.groups)})
    program = autopar.optimize(
        model,
        plan=plan,
        optimizer=optimizer,
        example_inputs=(data[rank], data[rank]),
        loss_fn=F.mse_loss,
        capture="never",
        check="always",
    )
    expected = torch.autograd.grad(F.mse_loss(eager(torch.cat(data)), torch.cat(data)), eager.once.weight)[0]
    for step in range(6):
        model.uses = step == 0
        program.step((data[rank], data[rank]))
    kept = program.state_dict()["state"]["residual"]["once.weight"]
    moved = eager.once.weight.detach() - model.once.weight.detach()
    assert bool((moved != 0).sum() > 36 * 0.4), "nothing has arrived later"
    return float((moved + kept - expected).abs().max())


class Odd(nn.Module):
    """16-bit parameters: of no dimension, of no elements, of one element, and a table that is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.scale, self.none, self.one = (nn.Parameter(torch.ones(shape)) for shape in ((), (0, 3), (1,)))
        self.bfloat16()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(ids)) * self.scale * self.one
        found: torch.Tensor = self.out(hidden) + self.none.sum()
        return found


ODD_GROUPS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"name": "embed.weight", "dim": 1, "start": 0, "stop": 3}, {"name": "scale"}),
    ({"name": "embed.weight", "dim": 1, "start": 3, "stop": 8},),
    *(({"name": name},) for name in ("none", "one", "out.weight", "out.bias")),
)


def odd(rank: int, n: int, folder: str, method: str) -> str:
    """A hash of the parameters of a run that another one, run eagerly, goes on with as it would have; each step is
    compared."""
    programs = []
    for capture in ("auto", "never"):
        model = Odd()
        first, rest = [model.embed.weight, model.scale], [*model.out.parameters(), model.none, model.one]
        decayed: list[dict[str, Any]] = [{"params": first}, {"params": rest, "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(decayed, lr=0.1)
        settings: dict[str, Any] = {"example_inputs": batch(0, rank), "loss_fn": F.cross_entropy, "capture": capture}
        plan = autopar.plan(model, autopar.ClusterSpec.local(n), strategy="ddp", **settings)
        options = {"density": 0.2, "chunk": CHUNK}
        groups = tuple(
            SyncGroup.model_validate({"strategy": method, "options": options, "members": m}) for m in ODD_GROUPS
        )
        plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
        programs.append(autopar.optimize(model, plan=plan, optimizer=optimizer, check="always", **settings))
    program, again = programs
    for step in range(3):
        program.step(batch(step, rank))
    again.load_state_dict(program.state_dict())
    program.save(Path(folder) / f"odd {method}")
    again.load(Path(folder) / f"odd {method}")
    for step in range(3, 5):
        for one in programs:
            one.step(batch(step, rank))
    alike = zip(program.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in alike), "not the run that was not interrupted"
    flat = torch.cat([p.detach().float().reshape(-1) for p in program.model.parameters()])
    assert bool(flat.isfinite().all())
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
