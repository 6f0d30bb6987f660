"""The weight of a batch in the global mean, read off the graph.

The loss of a batch is a mean over something: samples, tokens that are not ignored, elements. The global loss is
the mean over all of it, so a rank's weight is how much of it its batch has. Averaging ranks with equal weights,
as is usual, is wrong where they differ, as with padded tokens.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx

from autopar.ir.capture import JointGraph

aten = torch.ops.aten

_MEAN = 1
"""ATen's code for reduction='mean' (`at::Reduction`)."""
_NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_ELEMENT_LOSSES = (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
_SCALED = (aten.mul.Scalar, aten.mul_.Scalar)
_TRANSPARENT = (aten.view.default, aten.squeeze.default, aten._to_copy.default, aten.clone.default)


@dataclass(frozen=True)
class BatchWeight:
    """How much a batch counts. Exactly one of `constant` and `counted` is set."""

    unit: str
    constant: float | None = None
    counted: torch.fx.GraphModule | None = None
    """From the batch's tensors to the weight, for what depends on their values."""

    def of(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The weight of a batch, a float64 scalar."""
        if self.counted is not None:
            return self.counted(*tensors)  # type: ignore[no-any-return]
        assert self.constant is not None
        return torch.tensor(self.constant, dtype=torch.float64)


def batch_weight(joint: JointGraph, batch_size: int | None) -> BatchWeight:
    """What the loss of `joint` is a mean over; samples where the graph does not tell."""
    node = joint.outputs[0]
    while node.op == "call_function" and node.target in _TRANSPARENT:
        node = node.args[0]  # type: ignore[assignment]
    if node.op == "call_function":
        node = _unsmoothed(node)
        source = node.args[0]
        if node.target is operator.getitem and isinstance(source, torch.fx.Node) and source.target in _NLL:
            counted = _counted(joint, source)
            if counted is not None:
                return BatchWeight("targets that are not ignored", counted=counted)
        elif (node.target is aten.mean.default and isinstance(source, torch.fx.Node)) or (
            node.target in _ELEMENT_LOSSES and _reduction(node) == _MEAN and isinstance(source, torch.fx.Node)
        ):
            return BatchWeight("elements of the loss", constant=float(source.meta["val"].numel()))
    return BatchWeight("samples", constant=float(batch_size or 1))


def _unsmoothed(loss: torch.fx.Node) -> torch.fx.Node:
    """Of a cross-entropy with label smoothing, the one without: both are means over the same targets.

    PyTorch adds to the latter the mean of -log p over all classes, of targets that are not ignored.
    """
    if loss.target not in (aten.add.Tensor, aten.add_.Tensor) or len(loss.args) != 2:
        return loss
    parts = [a.args[0] for a in loss.args if isinstance(a, torch.fx.Node) and a.target in _SCALED]
    plain = [n for n in parts if isinstance(n, torch.fx.Node) and n.target is operator.getitem]
    means = [n for n in parts if isinstance(n, torch.fx.Node) and n.target in (aten.div.Tensor, aten.div_.Tensor)]
    if len(plain) != 1 or len(means) != 1:
        return loss
    count = means[0].args[1]
    nll = plain[0].args[0]
    assert isinstance(nll, torch.fx.Node)
    counted = [] if not isinstance(count, torch.fx.Node) else [count, *_above(count), *_above(*_above(count))]
    same = nll.target in _NLL and any(n.target is aten.eq.Scalar and n.args[0] is nll.args[1] for n in counted)
    return plain[0] if same else loss


def _above(*nodes: torch.fx.Node) -> list[torch.fx.Node]:
    return [a for n in nodes for a in n.all_input_nodes]


def _reduction(node: torch.fx.Node) -> object:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("reduction", _MEAN)


def _counted(joint: JointGraph, nll: torch.fx.Node) -> torch.fx.GraphModule | None:
    """The count of targets that are not ignored, or their summed class weights, from the batch alone."""
    _, target, class_weight, reduction, ignore_index = nll.args
    if reduction != _MEAN or class_weight is not None or not isinstance(target, torch.fx.Node):
        return None
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    kinds = dict(zip(placeholders, joint.inputs, strict=True))
    needed, frontier = set(), [target]
    while frontier:
        node = frontier.pop()
        if node in needed:
            continue
        needed.add(node)
        if node.op == "get_attr" or (node in kinds and kinds[node][0] != "batch"):
            return None
        frontier.extend(node.all_input_nodes)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, node in sorted((int(kinds[n][1]), n) for n in placeholders if kinds[n][0] == "batch"):
        copies[node] = graph.placeholder(f"batch_{index}")
    for node in joint.module.graph.nodes:
        if node in needed and node.op == "call_function":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    kept = graph.call_function(aten.ne.Scalar, (copies[target], ignore_index))
    graph.output(graph.call_function(aten.sum.default, (kept,), {"dtype": torch.float64}))
    return torch.fx.GraphModule({}, graph, class_name="BatchWeight")
