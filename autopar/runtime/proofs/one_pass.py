"""One forward and backward pass on one rank, by the captured graph or as the user's model runs, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.batch import Batch
from autopar.ir.capture import JointGraph
from autopar.runtime.model.eager import backward, loss_of, without_trace
from autopar.runtime.proofs.differences import FLOOR, difference, times
from autopar.runtime.replay import as_captured

Tensors = Mapping[str, torch.Tensor | None]
"""By what they are called in messages; `None` for no gradient, which is one of zeros."""


How = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function of the user's to one that computes the same in another way, as by PyTorch's tracing."""


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: each operator when Python comes to it."""
    return function


@dataclass(frozen=True)
class Ran:
    """What one forward and backward pass has given."""

    outputs: Tensors
    gradients: Tensors
    buffers: Tensors


def differences(found: Ran, expected: Ran, tolerance: float, over: float = 1.0) -> dict[str, float]:
    """By name, how many times what is allowed differs by more than `over`."""
    sizes = [float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()]
    floor = FLOOR * max(sizes, default=0.0)
    pairs = [
        (found.outputs, expected.outputs, 0.0),
        (found.gradients, expected.gradients, floor),
        (found.buffers, expected.buffers, 0.0),
    ]
    wrong = {}
    for mine, theirs, least in pairs:
        for name, reference in theirs.items():
            value = mine.get(name)
            if reference is None or value is None:
                some = reference if value is None else value
                off = 0.0 if some is None or not some.numel() else times(float(some.abs().max()), floor * tolerance)
            else:
                off = difference(value, reference, tolerance, least)
            if off > over:
                wrong[name] = off
    return wrong


def step_by_graph(joint: JointGraph, arguments: Sequence[torch.Tensor]) -> Ran:
    """One rank's part of a step, as the joint graph computes it, on the values of its placeholders in order."""
    with as_captured():
        values = joint.module(*arguments)
    results = joint.module.graph.output_node().args[0]
    by_node = {n: v for n, v in zip(results, values, strict=True) if n is not None}  # type: ignore[arg-type]
    gradients = {f"the gradient of '{n}'": by_node[node] for n, node in joint.gradients.items()}
    buffers = {f"buffer '{n}'": by_node[node] for n, node in joint.mutations}
    return Ran({"the loss": by_node[joint.outputs[0]].reshape(())}, gradients, buffers)


def step_eagerly(
    owners: Mapping[str, nn.Module],
    loss_fn: Any,
    batch: Batch,
    parameters: Mapping[str, nn.Parameter],
    written: Iterable[str],
    how: How = as_it_is,
) -> Ran:
    """The same as the user's model computes it. `parameters`: by the names that the joint graph's gradients have.
    `written`: the buffers that are looked at. `how`: what calls the function from a batch to its loss."""
    gradients: dict[str, torch.Tensor | None] = {f"the gradient of '{n}'": None for n in parameters}

    def take(name: str, gradient: torch.Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        gradients[f"the gradient of '{name}'"] = dense.detach().clone()

    with without_trace(owners) as buffers, torch.enable_grad():
        loss = how(loss_of)(owners[""], loss_fn, batch.rebuild(batch.copied()))
        backward(loss, parameters, take)
    held = {f"buffer '{n}'": buffers[n] for n in written if n in buffers}
    return Ran({"the loss": loss.detach().reshape(())}, gradients, held)
