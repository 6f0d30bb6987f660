"""Which gradients a backward pass of a drop-in module comes to, given the outputs whose gradients have arrived."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx

from autopar.ir.joint import JointGraph


@dataclass(frozen=True)
class Reached:
    """Which parameters and inputs a backward pass comes to."""

    parameters: tuple[bool, ...]
    """In the order of `TrainingGraph.parameters`."""
    inputs: tuple[bool, ...]
    """In the order of `JointGraph.input_gradients`."""


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
            self._known[arrived] = Reached(parameters, inputs)
        return self._known[arrived]
