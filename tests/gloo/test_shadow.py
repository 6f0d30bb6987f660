"""Exact steps in the shadow of a plan's: they show where a plan holds training up, and leave it as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gloo.checkpoints import same
from tests.gloo.ranks import run_ranks
from tests.unit.synthetic import cpu_hosts

LEFT_ALONE = (
    "quantized",
    "ddp+every=4",
    "diloco+every=4",
    "weight_differences",
    "power_sgd+from_step=4",
    "ddp+delay=1",
)
CASES = [*((name, "auto") for name in LEFT_ALONE), ("quantized", "never")]
STAGNATES, RATE = "ddp+delay=2", 0.2


class Net(nn.Module):
    """With running statistics, random numbers, and, if it `counts`, Python's own state: then it runs eagerly."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)
        self.spare = nn.Parameter(torch.ones(3))
        self.counts, self.calls, self.uses_all = counts, 0, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        x = x + 0 * self.spare.sum() if self.uses_all else x
        return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.1, self.training))  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1_000 * step + rank)
    x, w = torch.randn(16 + rank, 20, generator=drawn), torch.randn(20, 5, generator=torch.Generator().manual_seed(7))
    return x, (x @ w).tanh().argmax(1)


def guarded(name: str, rank: int, n: int, capture: str, lr: float) -> Any:
    import autopar
    from autopar.quality.program import BudgetedProgram
    from autopar.search import build_plan

    torch.manual_seed(0)
    model, cluster = Net(counts=capture == "never"), cpu_hosts(n, "20 Mbit/s")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == "weight_differences":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    given = {"example_inputs": batch(0, rank), "loss_fn": F.cross_entropy, "optimizer": optimizer, "capture": capture}
    plain = autopar.optimize(model, cluster, strategy="ddp", check="never", **given)  # type: ignore[call-overload]
    plan = build_plan(name, plain.graph, cluster, plain.context)
    made = BudgetedProgram(model, plan, plain.group, optimizer, plain.settings, plain.context)
    made.adopt(plain.graph, batch(0, rank))
    return made


def left(program: Any, rank: int) -> dict[str, Any]:
    seen: list[float] = []
    program.observe(lambda fragment, gradient: seen.append(float(gradient.sum())))
    losses = [float(program.step(batch(step, rank))) for step in range(12)]
    return {"state": program.state_dict(), "losses": losses, "seen": seen, "calls": program.model.calls}


def of_ranks(rank: int, n: int) -> dict[str, Any]:
    from autopar.quality import shadow

    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, capture in CASES:
        each = []
        for shadow.FIRST, shadow.SHADOW_STEPS in ((10_000, 4), (2, 4)):
            program = guarded(name, rank, n, capture, 0.05)
            compared: list[Any] = []
            program.guard.compare = lambda step, plans, exact, to=compared: to.append((step, plans, exact))
            each.append({**left(program, rank), "compared": compared})
        without, beside = each
        found[f"{name}, {capture}"] = {
            "equal": same(without["state"], beside["state"]) and without["losses"] == beside["losses"],
            "seen": without["seen"] == beside["seen"],
            "calls": without["calls"] == beside["calls"],
            "compared": (without["compared"], beside["compared"]),
        }
    shadow.FIRST, shadow.SHADOW_STEPS = 40, 16
    program = guarded(STAGNATES, rank, n, "auto", RATE)
    for step in range(60):
        program.step(batch(step, rank))
    found["reason"] = program.guard.reason
    found["rates"] = in_a_schedule(rank, n)
    found["unused"] = unused_behind_the_guard(rank, n)
    return found


def in_a_schedule(rank: int, n: int) -> list[float]:
    """By how much exact steps lead where all is sent exactly, and the learning rate rises within the window."""
    program = guarded("quantized(bits=8)", rank, n, "auto", 1e-4)
    compared: list[Any] = []
    program.guard.compare = lambda step, plans, exact: compared.append((plans, exact))
    for step in range(56):
        program.optimizer.param_groups[0]["lr"] = 1e-4 if step < 44 else 0.02
        program.step(batch(step, rank))
    [(plans, exact)] = compared
    return [a - b for a, b in zip(plans, exact, strict=True)]


def unused_behind_the_guard(rank: int, n: int) -> bool:
    """Whether exact steps, behind the guard, leave a parameter as it is that no rank uses, as DDP does."""
    program = guarded("quantized", rank, n, "never", 0.05)
    program.optimizer.param_groups[0]["weight_decay"] = 0.1
    spare = program.model.spare
    program.step(batch(0, rank))
    program.model.uses_all = False
    program.guard.seen.reason = "stepped in"
    before = spare.detach().clone()
    program.step(batch(1, rank))
    return torch.equal(before, spare)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(2, of_ranks)


@pytest.mark.parametrize(("name", "capture"), CASES)
def test_training_is_as_if_nobody_had_looked(outcomes: list[dict[str, Any]], name: str, capture: str) -> None:
    for found in outcomes:
        one = found[f"{name}, {capture}"]
        without, beside = one["compared"]
        assert one["equal"] and one["seen"] and one["calls"]
        assert not without
        if capture == "never":  # what a model does that runs eagerly cannot be put back
            assert not beside
        else:
            assert len(beside) == 1 and len(beside[0][1]) == len(beside[0][2]) == 4
    assert outcomes[0][f"{name}, {capture}"]["compared"] == outcomes[1][f"{name}, {capture}"]["compared"]


def test_a_plan_that_holds_training_up_is_left_for_exact_steps(outcomes: list[dict[str, Any]]) -> None:
    assert {found["reason"] for found in outcomes} == {outcomes[0]["reason"]}
    assert "exact steps from the same place" in outcomes[0]["reason"]


def test_exact_steps_follow_the_schedule(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert all(abs(lead) < 0.02 for lead in found["rates"])


def test_behind_the_guard_a_parameter_that_nobody_uses_is_left_alone(outcomes: list[dict[str, Any]]) -> None:
    assert all(found["unused"] for found in outcomes)
