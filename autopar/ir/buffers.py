"""Which buffers the loss depends on and the forward pass writes: moving averages, code books, queues."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
import torch.fx

from autopar.ir.capture import JointGraph

aten = torch.ops.aten

_TRAINS_AT = {
    aten._native_batch_norm_legit_functional.default: 5,
    aten._batch_norm_with_update_functional.default: None,
    aten.cudnn_batch_norm.default: 5,
    aten.native_batch_norm_backward.default: 7,
    aten.batch_norm_backward.default: 7,
    aten.cudnn_batch_norm_backward.default: None,
}
"""Batch normalization, and which argument says whether it trains; `None`: it always does."""
_STATISTICS = slice(3, 5)
"""Their running mean and variance, on which in training nothing depends but their own new values."""


def read_and_written(joint: JointGraph) -> tuple[str, ...]:
    """Names of the buffers that the graph writes, and that its outputs or gradients depend on, in this step or through
    other buffers in later ones; in the graph's order.

    Running statistics of batch normalization in training mode are not among them: nothing else reads them there.
    """
    new = dict(joint.mutations)
    results, found = _results(joint), set[str]()
    while more := set(read(joint, [n for n in new if n not in found], results)):
        found |= more  # and what their next values are made of
        results |= {new[n] for n in more}
    return tuple(n for n in new if n in found)


def read(joint: JointGraph, names: Collection[str], results: set[torch.fx.Node] | None = None) -> list[str]:
    """Those of these buffers that the graph's outputs or gradients depend on, or these `results`."""
    if not names:
        return []
    inputs = zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=True)
    placeholders = {name: node for (kind, name), node in inputs if kind == "buffer"}
    results = _results(joint) if results is None else results
    return [n for n in names if n in placeholders and _reaches(placeholders[n], results)]


def _results(joint: JointGraph) -> set[torch.fx.Node]:
    outputs = joint.outputs[:1] if joint.has_outputs else joint.outputs
    return {*outputs, *joint.gradients.values(), *joint.input_gradients.values()}


def _reaches(start: torch.fx.Node, results: set[torch.fx.Node]) -> bool:
    found, frontier = {start}, [start]
    while frontier:
        node = frontier.pop()
        if node in results:
            return True
        dependent = [u for user in node.users for u in _dependent(user, node) if u.op != "output" and u not in found]
        found.update(dependent)
        frontier += dependent
    return False


def _dependent(user: torch.fx.Node, node: torch.fx.Node) -> list[torch.fx.Node]:
    """What depends on `node` where `user` reads it: of a batch normalization's statistics, their new values alone."""
    if user.target not in _TRAINS_AT:
        return [user]
    trains_at, args = _TRAINS_AT[user.target], list(user.args)
    if trains_at is None or args[trains_at] is True:
        args[_STATISTICS] = [None, None]
    if node in args:
        return [user]
    return [u for u in user.users if u.target is operator.getitem and u.args[1] in (3, 4, 5)]
