"""Takes one model of the zoo through the whole road, and compares its step with eager PyTorch's."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.zoo import Entry

LOSS_TOLERANCE = 1e-5
"""Relative, in float32: the graph adds in another order than eager PyTorch does."""
UPDATE_TOLERANCE = 1e-3
"""Norm of the difference between the two updates of a parameter, relative to the eager update's norm."""
ROUNDING = 1e-7
"""Differences below this, relative to the parameter, or to 1 where it is smaller, are rounding in float32."""
PRICED_WORLD_SIZE = 4
SEARCH_BUDGET_S = 0.3
"""That a plan is found and priced is what is examined here, not how good it is."""


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture."""

    name: str
    kind: str
    parameters: int = 0
    nodes: int = 0
    """Of the joint graph, after its simplification."""
    optimize_s: float = 0.0
    """Capture, planning for one rank, and rewriting, together."""
    planned: str = ""
    """The plan for four ranks: its strategies, and its predicted step time."""
    loss_error: float = 0.0
    update_error: float = 0.0
    """The largest over all parameters."""
    failure: str = ""
    """Empty where everything succeeded."""
    eager: str = ""
    """Why it runs eagerly; empty where it is captured."""
    unreached: Sequence[str] = ()
    """Trainable parameters that get no gradient, in eager PyTorch either."""


def attempt(entry: Entry) -> Outcome:
    """`examine`, with whatever it raises as the reason of failure."""
    try:
        return examine(entry)
    except Exception as e:  # a failure of any kind is a finding here
        return Outcome(entry.name, entry.kind, failure=reason(e))


def reason(e: Exception) -> str:
    """What went wrong, in a line: the first clause of the message, and the line of the model that it names."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()] or ["no message"]
    where = next((line.removeprefix("at ") for line in lines if re.match(r"at \S+:\d+", line)), "")
    file, _, rest = where.partition(":")
    return f"{type(e).__name__}: {lines[0].split('; ')[0]}" + (f" ({Path(file).name}:{rest})" if where else "")


def examine(entry: Entry) -> Outcome:
    """Captures, plans and rewrites a model, and takes a step with it; raises where the road ends early."""
    import autopar
    import autopar.errors
    from autopar.ops.context import Context
    from autopar.search import Budget, search

    model, batch = entry.build(), entry.batch(entry.batch_size, 1)
    eager = copy.deepcopy(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    began = time.perf_counter()
    options: dict[str, Any] = {
        "example_inputs": batch,
        "loss_fn": entry.loss_fn,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "unused_parameters": "freeze",
        "time_budget_s": SEARCH_BUDGET_S,
    }
    eagerly = ""
    try:
        program = autopar.optimize(model, autopar.ClusterSpec.local(1), **options, capture="always")
    except autopar.errors.CaptureError as e:
        eagerly = reason(e)
        program = autopar.optimize(model, autopar.ClusterSpec.local(1), **options, capture="never")
    optimize_s = time.perf_counter() - began
    graph = program.compile_for(batch).graph
    cluster = autopar.ClusterSpec.local(PRICED_WORLD_SIZE)
    plan = search(graph, cluster, Context(PRICED_WORLD_SIZE), budget=Budget(time_s=SEARCH_BUDGET_S))
    assert plan.prediction is not None
    strategies = ", ".join(sorted({g.strategy for g in plan.groups}))
    torch.manual_seed(0)
    loss = float(program.step(batch))
    expected, unreached = eager_step(eager, entry, batch)
    after, wanted = dict(model.named_parameters()), dict(eager.named_parameters())
    errors = {n: update_error(before[n], after[n].detach(), wanted[n].detach()) for n in before}
    worst = max(errors, key=lambda n: errors[n])
    failure = ""
    if not loss_error(loss, expected) <= LOSS_TOLERANCE:
        failure = f"the loss is {loss:.7g}, eager PyTorch's is {expected:.7g}"
    elif not errors[worst] <= UPDATE_TOLERANCE:
        failure = f"the update of '{worst}' is off by {errors[worst]:.2g} of its norm"
    return Outcome(
        name=entry.name,
        kind=entry.kind,
        parameters=sum(p.numel() for p in model.parameters()),
        nodes=len(graph.compute),
        optimize_s=optimize_s,
        planned=f"{strategies}: {plan.prediction.step_time_s * 1e3:.3g} ms",
        loss_error=loss_error(loss, expected),
        update_error=errors[worst],
        failure=failure,
        eager=eagerly,
        unreached=unreached,
    )


def eager_step(model: nn.Module, entry: Entry, batch: object) -> tuple[float, tuple[str, ...]]:
    """One step of SGD at a rate of 1, so that a parameter's update is its gradient; the loss, and the names of the
    parameters without gradient."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = entry.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item(), tuple(n for n, p in model.named_parameters() if p.requires_grad and p.grad is None)


def loss_error(loss: float, expected: float) -> float:
    """Relative to the expected loss."""
    return abs(loss - expected) / max(abs(expected), 1e-12)


def update_error(before: torch.Tensor, after: torch.Tensor, expected: torch.Tensor) -> float:
    """By how much two updates of a parameter differ, relative to the expected one.

    Differences that are rounding of the parameter count as none, so that an update which is zero but for rounding
    (a key's bias, which softmax cancels) has no error.
    """
    difference = torch.linalg.vector_norm(after.double() - expected.double()).item()
    floor = ROUNDING * max(torch.linalg.vector_norm(before.double()).item(), before.numel() ** 0.5)
    if difference <= floor:
        return 0.0
    return float(difference / max(torch.linalg.vector_norm(expected.double() - before.double()).item(), floor))
