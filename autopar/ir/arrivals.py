"""Which gradients a backward pass of a drop-in module comes to, given the outputs whose gradients have arrived."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.fx

from autopar.ir.aliases import is_view
from autopar.ir.joint import JointGraph

aten = torch.ops.aten
_ZEROS_OF_ZEROS = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.neg.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.cat.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.slice_backward.default,
        aten.select_backward.default,
    }
)
"""Operators whose value is zeros where all of their inputs are, besides views."""


@dataclass(frozen=True)
class Reached:
    """Which parameters and inputs a backward pass comes to."""

    parameters: tuple[bool, ...]
    """In the order of `TrainingGraph.parameters`."""
    inputs: tuple[bool, ...]
    """In the order of `JointGraph.input_gradients`."""
    outputs: frozenset[int] = frozenset()
    """The outputs whose gradients have arrived, by number."""
    silent: frozenset[torch.fx.Node] = frozenset()
    """Nodes that autograd would not compute, as they depend on none of those, but for those that are zeros anyhow where
    all other gradients of outputs are zeros. Of zeros, an infinite derivative would make NaN."""


class Arrivals:
    """Of each gradient, the outputs whose gradients it is computed from."""

    def __init__(self, joint: JointGraph, parameters: Iterable[torch.fx.Node]) -> None:
        """`parameters`: the nodes of their gradients."""
        of: dict[torch.fx.Node, frozenset[int]] = {}
        placeholders = dict(zip(joint.module.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
        for node in joint.module.graph.nodes:
            kind, key = placeholders.get(node, ("", -1))
            of[node] = frozenset[int]().union(*(of[n] for n in node.all_input_nodes))
            if kind == "tangent":
                of[node] = frozenset({int(key)})
        self._of = of
        self._parameters = [of[n] for n in parameters]
        self._inputs = [of[n] for n in joint.input_gradients.values()]
        self._known: dict[frozenset[int], Reached] = {}
        every = {int(key) for kind, key in joint.inputs if kind == "tangent"}
        self.may_miss = any(outputs and outputs != every for outputs in self._parameters)
        """Whether a backward pass that begins from some output may come to some parameters and not to others."""

    def reached(self, arrived: frozenset[int]) -> Reached:
        """`arrived`: the outputs whose gradients have, by number. What depends on none of the outputs, as the gradient
        of what is rounded, which is zeros, counts as reached."""
        if arrived not in self._known:
            parameters, inputs = (
                tuple(not outputs or not outputs.isdisjoint(arrived) for outputs in these)
                for these in (self._parameters, self._inputs)
            )
            self._known[arrived] = Reached(parameters, inputs, arrived, self._silent(arrived))
        return self._known[arrived]

    def _silent(self, arrived: frozenset[int]) -> frozenset[torch.fx.Node]:
        gone = {n for n, outputs in self._of.items() if outputs and outputs.isdisjoint(arrived)}
        return frozenset(n for n in gone if isinstance(n.meta.get("val"), torch.Tensor) and not _stays_zeros(n, gone))


def _stays_zeros(node: torch.fx.Node, zeros: Collection[torch.fx.Node]) -> bool:
    """Whether a node's value is zeros as that of all nodes of `zeros` is, whatever the others' values."""
    if node.op == "placeholder":
        return True
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, tuple, list))]
    return (is_view(node) or node.target in _ZEROS_OF_ZEROS) and all(n in zeros for n in tensors)
