"""Where a step goes wrong: in what was captured, in what was rewritten, or in how ranks synchronize it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn

from autopar.ir.batch import Batch, flatten
from autopar.ir.capture import JointGraph, Mode, capture_joint
from autopar.ir.structure import is_random
from autopar.runtime.replay import as_captured

_SHOWN = 5


def blame(wrong: Mapping[str, float], how: str, where: str) -> str:
    """The message for what differs, by how many times what is allowed."""
    return (
        f"the program does not compute what the model computes eagerly{', ' + how if how else ''}: {_worst(wrong)}. "
        f"{where}. Where no pass of your own rewrites the graph, this is a fault of autopar: please report it. With "
        "check='never', nothing is compared"
    )


def blame_tracing(wrong: Mapping[str, float], how: str, line: str) -> str:
    """The message for what differs because PyTorch traces the model to something else. `line`: where, or empty."""
    place = f" of {line}," if line else " of the model"
    return (
        f"PyTorch's own tracing{place} gives other numbers than running it does{', ' + how if how else ''}: "
        f"{_worst(wrong)}. torch.compile(model, backend='aot_eager') computes the same other numbers, without autopar. "
        "Write the line otherwise: where it writes to a view, an expanded one above all, compute a new tensor instead; "
        "or pass capture='never', with which the model runs as it is"
    )


def blame_feedback(wrong: Mapping[str, float], how: str, strategies: Sequence[str]) -> str:
    """The message for strategies of which what is updated with and kept does not add up to the gradients."""
    said = ", ".join(f"'{name}'" for name in strategies)
    return (
        "what is updated with, and the change of what ranks keep for later, do not add up to the gradients of all "
        f"ranks{', ' + how if how else ''}, under {said}: {_worst(wrong)}. A strategy may lose nothing of a gradient: "
        "what it does not send, it keeps in a state of which each rank has its own part of a sum. `python -m "
        "autopar.testing` tries a strategy by itself; with check='never', nothing is compared"
    )


def blame_wire(wrong: Mapping[str, float], largest: Mapping[str, float]) -> str:
    """The message for gradients that float16 does not hold; `largest`: the largest element of each."""
    name, value = next(iter(largest.items()))
    return (
        f"float16 on the wire holds numbers from 6.1e-5 to 65504, and the largest element of the gradient of '{name}' "
        f"is {value:.3g}: {_worst(wrong)}. Use bfloat16, which has float32's range (strategy='ddp+bf16', or wire: "
        "bfloat16 in the plan's groups), or scale the loss"
    )


def _worst(wrong: Mapping[str, float]) -> str:
    worst = sorted(wrong.items(), key=lambda x: -x[1])
    shown = "; ".join(f"{what} by {times:.3g} times what is allowed" for what, times in worst[:_SHOWN])
    return shown + (f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else "")


def first_difference(
    model: nn.Module, loss_fn: Any, batch: Any, joint: JointGraph, arguments: Sequence[torch.Tensor], mode: Mode
) -> str:
    """Says at which node the rewritten graph parts from the one that was captured, if at any.

    `arguments`: of the joint graph's placeholders, in order. The model is captured once more, without any rewriting.
    """
    flat = batch if isinstance(batch, Batch) else flatten(batch)
    raw = capture_joint(model, flat, loss_fn, mode)
    if raw.inputs != joint.inputs or any(is_random(n) for n in raw.module.graph.nodes):
        return "Where it begins was not looked for, as the model draws random numbers"
    with as_captured():
        known = _Values(raw.module)
        known.run(*arguments)
        told = _Compared(joint.module, known.values)
        told.run(*arguments)
    if told.first is None:
        return "One rank's graph computes what was captured, so it lies in the capture itself, or between the ranks"
    line = line_of(told.first)
    return f"It begins at '{told.first.name}' ({told.first.target}){', which computes ' + line if line else ''}"


def line_of(node: torch.fx.Node) -> str:
    """The user's line that a node computes a part of, with its file; empty where that is not known."""
    trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
    lines = [line for line in trace if line.strip(" ~^")]  # without what underlines a part of a line
    return f"{lines[-2].strip()}: {lines[-1].strip()}" if len(lines) > 1 else ""


class _Values(torch.fx.Interpreter):
    """Runs a graph and keeps a copy of every value, by its node's name."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.values[n.name] = value.detach().clone()
        return value


class _Compared(torch.fx.Interpreter):
    """Runs a graph and looks for the first value that is not the known one of its name."""

    def __init__(self, module: torch.fx.GraphModule, known: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module)
        self.first: torch.fx.Node | None = None
        self._known = known

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        other = self._known.get(n.name)
        if self.first is None and isinstance(value, torch.Tensor) and other is not None and not alike(value, other):
            self.first = n
        return value


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two values differ by no more than rounding."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() and b.is_floating_point()) or not a.numel():
        return True
    a, b = a.detach(), b.detach()
    scale = float(b.double().abs().max())
    narrow = min(a.dtype.itemsize, b.dtype.itemsize)
    off = float((a.double() - b.double()).abs().nan_to_num().max())
    return off <= {8: 1e-9, 4: 1e-4}.get(narrow, 5e-2) * max(scale, 1e-30)
