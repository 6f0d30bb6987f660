"""Checkpoints of one method that another goes on from, and parameters that a step leaves out, on several ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import autopar
from autopar.errors import PlanError, PlanMismatchError
from autopar.runtime.program import Program
from autopar.spec.plan import ParameterSlice, SyncGroup

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
    found["a loss's rows"] = _loss_module(rank)
    found["renamed"] = _renamed(rank)
    found["slices apart"] = _slices_apart(rank, folder)
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


class Proxies(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out @ self.weight.t() @ self.weight, target)


def _loss_module(rank: int) -> dict[str, Any]:
    """Rows of a loss's parameter on one rank each: what loading and saving it does."""
    model, loss = Parts(), Proxies()
    program: Program = autopar.optimize(
        model,
        example_inputs=_data(0, rank),
        loss_fn=loss,
        optimizer=torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1),
        pin={"loss_fn.weight": "sharded_parameters"},
    )
    program.step(_data(0, rank))
    state = program.state_dict()
    program.load_state_dict(state)
    again = program.state_dict()
    try:
        loss.state_dict()
        said = "nothing"
    except PlanError as e:
        said = str(e)
    return {"equal": bool(torch.equal(state["loss_fn"]["weight"], again["loss_fn"]["weight"])), "said": said}


def _renamed(rank: int) -> bool:
    """Whether replicas that are apart are saved as their mean, also where a hook gives parameters other names."""
    model = Parts()
    model.always = checkpoint_wrapper(model.always)  # type: ignore[assignment]
    program = _program(model, "ddp+every=4", rank)
    for step in range(2):
        program.step(_data(step, rank))
    state = program.state_dict()["model"]
    mean = model.always.weight.detach().clone() / dist.get_world_size()
    dist.all_reduce(mean)
    return set(state) == set(model.state_dict()) and bool(torch.allclose(state["always.weight"], mean))


def _slices_apart(rank: int, folder: str) -> float:
    """How far a step is from that of a program that was not saved, where one slice of a parameter alone keeps
    something."""

    def made() -> tuple[nn.Module, Program]:
        model = Parts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        cluster = autopar.ClusterSpec.local(dist.get_world_size())
        plan = autopar.plan(
            model, cluster, example_inputs=_data(0, rank), loss_fn=F.mse_loss, optimizer=optimizer, strategy="ddp"
        )
        parts = [ParameterSlice(name="always.weight", dim=0, start=a, stop=a + 3) for a in (0, 3)]
        rest = [ParameterSlice(name=p.name) for p in plan.model.parameters if p.name != "always.weight"]
        each = (("weight_differences", parts[:1]), ("all_reduce", parts[1:]), ("all_reduce", rest))
        groups = tuple(SyncGroup(strategy=strategy, members=tuple(members)) for strategy, members in each)
        plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
        program: Program = autopar.optimize(
            model, example_inputs=_data(0, rank), loss_fn=F.mse_loss, optimizer=optimizer, plan=plan
        )
        return model, program

    model, program = made()
    for step in range(3):
        program.step(_data(step, rank))
    program.save(Path(folder) / "slices")
    other, again = made()
    again.load(Path(folder) / "slices")
    program.step(_data(3, rank))
    again.step(_data(3, rank))
    return max(
        float((p - q).abs().max()) for p, q in zip(model.parameters(), other.parameters(), strict=True) if len(p)
    )


def _left_out(rank: int, strategy: str) -> dict[str, float]:
    """How far parameters move that no rank uses, and that are frozen for a while, in a model that runs eagerly; -1
    where that is refused."""
    model = Parts()
    program = _program(model, strategy, rank, capture="never")
    for step in range(3):
        program.step(_data(step, rank))
    found = {}
    for name in ("unused", "frozen"):
        model.uses = name == "frozen"
        model.sometimes.weight.requires_grad_(name != "frozen")
        before = model.sometimes.weight.detach().clone()
        try:
            for step in range(3):
                program.step(_data(step, rank))
        except PlanMismatchError as e:
            assert "would move it all the same" in str(e)
            found[name] = -1.0
            break
        found[name] = float((model.sometimes.weight.detach() - before).abs().max())
    return found
