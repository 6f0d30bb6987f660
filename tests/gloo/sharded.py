"""What the tests of parameters that live on one rank each run: three ranks share a head's classes out, or all rows."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Plan
from autopar.errors import PlanError, SignatureError
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ops import products
from autopar.runtime.program import Program
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.testing import classes
from tests.gloo.captures import traced_once

CLASSES = 13
SAMPLES = (3, 1, 2)
SHARED_OUT: dict[str, tuple[str, ...]] = {
    "column_parallel_linear": ("inner.weight", "head.weight"),
    "class_sharded_head": ("head.weight", "head.bias"),
    "sharded_parameters": ("head.weight", "head.bias", "inner.weight", "inner.bias", "table.weight"),
}
"""By strategy, what lives on one rank each."""


def net() -> nn.Module:
    torch.manual_seed(3)
    return classes.Classes(CLASSES, bias=True).double()


def batch(step: int, rank: int, more: int = 0) -> Any:
    return classes.batch(SAMPLES[rank] + more, 100 * step + 10 * rank + 2, CLASSES)


def plan_for(n: int, strategy: str, options: dict[str, Any] | None = None) -> Plan:
    """What the strategy shares out, and the rest in one all-reduce."""
    graph = training_graph(net(), flatten(batch(0, 0)), classes.loss)
    made = autopar.plan(net(), ClusterSpec.local(n), example_inputs=batch(0, 0), loss_fn=classes.loss, strategy="ddp")
    names = SHARED_OUT[strategy]
    rest = tuple(ParameterSlice(name=p.name) for p in graph.parameters if p.name not in names)
    shared = tuple(
        SyncGroup(strategy=strategy, members=tuple(ParameterSlice(name=name) for name in some), options=options or {})
        for some in ([(name,) for name in names] if strategy == "column_parallel_linear" else (names[:2], names[2:]))
        if some
    )
    fidelity = "rounded" if options else "exact"
    groups = (*shared, *(SyncGroup(strategy="all_reduce", members=rest) for _ in rest[:1]))
    return made.model_copy(update={"groups": groups, "fidelity": fidelity})


def program_for(model: nn.Module, n: int, strategy: str, options: dict[str, Any] | None = None) -> Program:
    optimizer = _optimizer(model, options)
    plan = plan_for(n, strategy, options)
    found: Program = autopar.optimize(
        model, example_inputs=batch(0, 0), loss_fn=classes.loss, optimizer=optimizer, plan=plan
    )
    return found


def _optimizer(model: nn.Module, rounded: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0) if rounded else torch.optim.AdamW(model.parameters(), lr=1e-2)


def eager(steps: range, n: int, state: Any = None, rounded: bool = False) -> nn.Module:
    """The same steps in one process."""
    model = net()
    optimizer = _optimizer(model, rounded)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        words, target = (torch.cat(x) for x in zip(*(batch(step, r) for r in range(n)), strict=True))
        optimizer.zero_grad()
        classes.loss(model(words), target).backward()
        optimizer.step()
    return model


def distance(program: Program, other: nn.Module) -> float:
    with program.gathered():
        pairs = zip(program.model.parameters(), other.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)


def _within_gathered(rank: int, program: Program) -> dict[str, Any]:
    """What the program does while its parameters are whole, and must not take them for its own rows."""
    before = copy.deepcopy(program.state_dict())
    refused = []
    with program.gathered():
        with program.evaluation():
            program.model(batch(0, 0)[0])
        # Something else than was seen is captured.
        program.compile_for(batch(0, rank, more=2))
        for use in (lambda: program.step(batch(2, rank)), lambda: program.load("nowhere")):
            try:
                use()
            except PlanError as e:
                refused.append("within 'with program.gathered():'" in str(e))
        with torch.no_grad():
            for p in program.model.parameters():
                p.add_(1)
        changed, was = program.state_dict()["model"], before["model"]
        more = [float((changed[name] - was[name]).mean()) for name, _ in program.model.named_parameters()]
        program.load_state_dict(before)
    return {"refused": refused, "more": more}


def _written_to(program: Program, rank: int, strategy: str) -> list[bool]:
    """Whether each use of the program refuses a parameter that was written to while its rows are elsewhere, once."""
    name = SHARED_OUT[strategy][-1]
    p = program.model.get_parameter(name)
    enter = contextlib.ExitStack()
    uses: list[Callable[[], Any]] = [
        lambda: program.step(batch(2, rank)),
        lambda: enter.enter_context(program.gathered()),
        program.state_dict,
        lambda: program.save("nowhere"),
    ]
    refused = []
    for use in uses:
        for write in (lambda: setattr(p, "data", torch.ones_like(p)), lambda: p.data.zero_()):
            write()
            try:
                use()
            except PlanError as e:
                refused.append(f"parameter '{name}' was written to" in str(e))
            else:
                refused.append(False)
    return refused


@traced_once()
def everything(rank: int, n: int) -> dict[str, Any]:
    """All findings of one rank, by strategy."""
    # Products are formed and applied a row or two at a time, as those of a large model are.
    products.FROM_BYTES, products.PIECE_BYTES = 1, 100
    return {strategy: _findings(rank, n, strategy) for strategy in SHARED_OUT}


def _findings(rank: int, n: int, strategy: str) -> dict[str, Any]:
    model = net()
    program = program_for(model, n, strategy)
    found: dict[str, Any] = {"refused": [], "held": {}}
    part = next(model.children())
    uses: list[Callable[[], Any]] = [
        lambda: model(batch(0, rank)[0]),
        model.state_dict,
        part.state_dict,
        lambda: copy.deepcopy(model),
        lambda: torch.save(model, io.BytesIO()),
    ]
    for use in uses:
        with contextlib.suppress(PlanError):
            use()
            continue
        found["refused"].append(True)
    found["held"] = {k: len(v) for k, v in program._lasting.rows.shards.items()}
    found["stored"] = {k: model.get_parameter(k).untyped_storage().nbytes() for k in SHARED_OUT[strategy]}
    for step in range(2):
        program.step(batch(step, rank))
    found["trained"] = distance(program, eager(range(2), n))
    plain = eager(range(2), n)
    with program.gathered(), torch.no_grad():
        words = batch(0, 0)[0]
        found["evaluated"] = float((model(words) - plain(words)).abs().max())
        copied = copy.deepcopy(model)
    found["copied"] = float((copied(words) - plain(words)).detach().abs().max())
    found["within"] = _within_gathered(rank, program)
    found["written to"] = _written_to(program, rank, strategy)
    found["unharmed"] = distance(program, plain)
    program.step(batch(2, rank, more=1))  # a new shape: captured while the rows are elsewhere
    file = io.BytesIO()
    torch.save(program.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = net()
    again = program_for(other, n, strategy)
    again.load_state_dict(state)
    again.step(batch(3, rank))
    found["resumed"] = distance(again, eager(range(3, 4), n, state=state))
    try:
        program.step(micro_batches=[batch(4, rank)] * (1 + rank % 2))
    except SignatureError as e:
        found["uneven"] = str(e)
    for wire in ("bfloat16", "float16"):
        rounded = program_for(net(), n, strategy, {"wire": wire})
        rounded.step(batch(0, rank))
        found[wire] = distance(rounded, eager(range(1), n, rounded=True))
    return found
