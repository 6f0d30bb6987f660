"""Runs every operation of a step by itself, and compares what it declares with what it does."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.node import Node
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar import ClusterSpec
from autopar.cost_models.optimizers import optimizer_cost
from autopar.ops.base import Call
from autopar.ops.values import Setting
from autopar.runtime.writer import CALL
from autopar.spec.plan import Plan

SAMPLES = 6
FULL = 5
"""Behind so many steps comes one in which all groups synchronize."""


class Net(nn.Module):
    """A table, a product, a layer that is shared out, a head; all wide enough that shares differ from the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 12)
        self.inner = nn.Linear(12, 30)
        self.head = nn.Linear(30, 25)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.inner(self.table(words).sum(1))))
        return found


def batch(rank: int) -> Any:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(0, 40, (SAMPLES, 3), generator=draw), torch.randint(0, 25, (SAMPLES,), generator=draw)


class Measured(torch.fx.Interpreter):
    """Runs a step, and adds up what the nodes of each call do."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.flops: dict[int, int] = defaultdict(int)
        self.calls: dict[int, Call] = {}
        self.values: dict[int, Any] = {}

    def run_node(self, n: Node) -> Any:
        if CALL not in n.meta:
            return super().run_node(n)
        call, is_value = n.meta[CALL]
        with FlopCounterMode(display=False) as counter:
            found = super().run_node(n)
        self.calls[call.index] = call
        self.flops[call.index] += counter.get_total_flops()
        if is_value:
            self.values[call.index] = found
        return found


def differences(rank: int, n: int, plan: str, optimizer: str = "SGD") -> list[str]:
    """What a step's operations declare otherwise than they do, on this rank; empty where all is as declared. Behind
    it, the names of those that were run."""
    torch.manual_seed(3)
    model = Net()
    made = Plan.loads(plan)
    program = autopar.optimize(
        model,
        ClusterSpec.local(n),
        example_inputs=batch(rank),
        loss_fn=F.cross_entropy,
        optimizer=getattr(torch.optim, optimizer)(model.parameters(), lr=0.1),
        plan=made,
        check="never",
    )
    for _ in range(FULL):
        program.step(batch(rank))
    compiled = program.compile_for(batch(rank))
    measured = Measured(compiled.graphs["step"])
    compiled.graphs["step"] = measured.run
    program.step(batch(rank))
    setting = Setting(n, optimizer_cost(optimizer).moved_tensors, rounds=True)
    found = []
    declared: dict[int, float] = defaultdict(float)
    counted: dict[int, int] = defaultdict(int)
    for index, call in measured.calls.items():
        if call.group is not None:  # what one of a group's operations forms in pieces, another one computes
            declared[call.group.index] += call.op.work(call, rank, setting).flops
            counted[call.group.index] += measured.flops[index]
        found += _of_value(call, measured.values.get(index), rank, setting)
    for group, flops in declared.items():
        if abs(flops - counted[group]) > 0.05 * counted[group]:
            found.append(f"group {group}: {flops:g} FLOPs declared, {counted[group]:g} counted")
    return [*found, "ran " + ",".join(sorted({c.op.name for c in measured.calls.values()}))]


def _of_value(call: Call, value: Any, rank: int, setting: Setting) -> list[str]:
    """Where a call's value has another size, dtype or memory than declared. What a batch decides may be padded."""
    if not isinstance(value, torch.Tensor) or value.is_sparse or call.is_pending:
        return []
    found = []
    if str(value.dtype) != f"torch.{call.dtype}" and call.group is not None:
        found.append(f"{call.op.name}: {value.dtype}, declared {call.dtype}")
    held = call.held_elements(rank)
    if held and not call.made.expected and value.numel() != held:
        found.append(f"{call.op.name}: {value.numel()} elements, declared {held}")
    size = call.op.allocates(call, setting)
    own = size if size is None or isinstance(size, int) else int(size[rank])
    if own and not call.made.expected and value.untyped_storage().nbytes() > own:
        found.append(f"{call.op.name}: {value.untyped_storage().nbytes()} bytes, declared {own}")
    return found
