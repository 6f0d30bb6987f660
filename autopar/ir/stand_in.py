"""Stands in for a captured graph where the model itself runs, for a batch that cannot be captured.

Strategies are lowered into it as into the graph that it stands in for: its nodes have the positions that the model's
passes have there, so collectives come in the same order. A rank can thus run one batch eagerly while others run theirs
as graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.batch_weight import BatchWeight, UnreadWeight
from autopar.ir.outline import Outline, run_backward, run_forward, take_gradient
from autopar.ir.training_graph import Parameter, TrainingGraph


@dataclass(frozen=True)
class StandIn(Outline):
    """The model's passes, at the positions of another graph: both passes where its backward pass begins, and every
    gradient behind them."""

    positions: tuple[int, ...] = ()
    """Of the nodes that compute, in their order."""

    def placed(self) -> list[tuple[int, torch.fx.Node]]:
        return list(zip(self.positions, self.computed(), strict=True))


def stand_in(graph: TrainingGraph) -> TrainingGraph:
    """A training graph in which the model itself runs, at the positions of one that was captured. Nothing of what the
    captured graph shows besides whole gradients is in it. Raises `CaptureError` where that is not enough."""
    joint, start = graph.joint, graph.backward_start
    assert joint is not None, "only a graph that was captured in this process is stood in for"
    if joint.sums_over_ranks:
        raise CaptureError("ranks exchange values within the model, in the order of its graph")
    early = next((p.name for p in graph.parameters if p.ready < start), None)
    if early is not None or start < 1:
        raise CaptureError(f"the gradient of '{early}' does not follow from the loss in the first batch's graph")
    made = torch.fx.Graph()
    trained = {}
    inputs: list[tuple[str, str | int]] = []
    for p in graph.parameters:
        trained[p.name] = made.placeholder(f"parameter_{len(inputs)}")
        trained[p.name].meta["val"] = _like(p)
        inputs.append(("parameter", p.name))
    batch, tangent = made.placeholder("batch"), made.placeholder("tangent")
    inputs += [("whole batch", 0), ("tangent", 0)]
    names = tuple(trained)
    forward = made.call_function(run_forward, (batch, *trained.values()), {"names": names})
    backward = made.call_function(run_backward, (forward, tangent))
    begun = next(n for (kind, _), n in zip(joint.inputs, _placeholders(joint.module), strict=True) if kind == "tangent")
    tangent.meta["val"] = forward.meta["val"] = torch.empty((), dtype=begun.meta["val"].dtype, device="meta")
    gradients = {}
    for p in graph.parameters:
        gradients[p.name] = made.call_function(take_gradient, (backward, p.name))
        gradients[p.name].meta["val"] = _like(p)
    made.output([forward, *gradients.values()])
    plain = StandIn(
        module=torch.fx.GraphModule(nn.Module(), made, class_name="StandIn"),
        inputs=tuple(inputs),
        mutations=(),
        outputs=(forward,),
        gradients=gradients,
        weight=None if joint.weight is None else UnreadWeight("samples", is_sum=True),
        in_pieces=frozenset(names),
        # Behind what is awaited for the forward pass, and before what is made of the loss.
        positions=(start - 1, *(start for _ in (backward, *gradients))),
    )
    parameters = tuple(
        replace(p, gradient=gradients[p.name].name, structure="dense", parts=None, head=None, table=None, layer=None)
        for p in graph.parameters
    )
    return replace(graph, parameters=parameters, eager=True, passes=(), joint=plain)


def counting(graph: TrainingGraph, weight: BatchWeight) -> TrainingGraph:
    """The same, for a batch that counts by `weight`."""
    assert graph.joint is not None
    return replace(graph, joint=replace(graph.joint, weight=weight))


def _placeholders(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _like(p: Parameter) -> torch.Tensor:
    return torch.empty(p.spec.shape, dtype=getattr(torch, p.spec.dtype), device="meta")
