"""Batches of which nothing counts, as ranks get them whose share of the data has run out, or is all padding."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from autopar.ir.capture import JointGraph

aten = torch.ops.aten


def keep_nothing_finite(joint: JointGraph, batch_size: int | None) -> None:
    """Has a batch of which nothing counts give gradients of 0, and not of 0 / 0.

    A mean over nothing is NaN. Such a batch has no share of the global one, so its backward pass starts from 0; what it
    reads of such means, and of the counts that they are divided by, is 1 then. Where it starts from another number, as
    it always does in one process, no value changes.
    """
    graph = joint.module.graph
    assert joint.weight is not None
    kinds = dict(zip(graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    tangents = [n for n, (kind, _) in kinds.items() if kind == "tangent"]
    late: set[torch.fx.Node] = set(tangents)
    nothing: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            continue
        of_nothing = batch_size == 0 and kinds.get(node, ("",))[0] == "batch"
        if of_nothing or node in joint.weight.may_be_nothing or not nothing.isdisjoint(node.all_input_nodes):
            nothing.add(node)
    patched = {n for n in nothing if _may_be_nan(n)}
    stopped: torch.fx.Node | None = None
    for reader in [n for n in graph.nodes if n in late and not patched.isdisjoint(n.all_input_nodes)]:
        with graph.inserting_before(reader):
            if stopped is None:
                stopped = _call(graph, aten.eq.Scalar, tangents[0], 0)
                if tangents[0].meta["val"].dim():
                    stopped = _call(graph, aten.squeeze.default, stopped)
            for node in [n for n in reader.all_input_nodes if n in patched]:
                reader.replace_input_with(node, _call(graph, aten.where.ScalarSelf, stopped, 1, node))
    graph.lint()


def _may_be_nan(node: torch.fx.Node) -> bool:
    """Whether it is a number that a mean over nothing is, or a count; how much an operator has counted is not."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() == 0 or node.op == "placeholder":
        return False
    if value.dtype == torch.bool:
        return False
    return node.target is not operator.getitem or bool(node.args[1] == 0)


def _call(graph: torch.fx.Graph, target: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda a: a.meta["val"]))
    return node
