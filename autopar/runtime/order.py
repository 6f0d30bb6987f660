"""What ranks compare before the first step: that they compute the same, and issue the same collectives in one order."""

from __future__ import annotations

import hashlib
import json
from types import FunctionType
from typing import Any

import torch.fx

from autopar.errors import PlanMismatchError
from autopar.ir.aliases import is_view
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.process_group import Rendezvous
from autopar.spec.plan import Plan
from autopar.strategies.lowering import StepProgram
from autopar.strategies.timing import Moments


class CollectiveOrder:
    """Holds every program of a plan, on every rank, to one order of collectives, before the first is issued."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan) -> None:
        self._rendezvous = rendezvous
        self._plan = plan
        self._hashes: dict[Moments, str] = {}
        """Of each step that a plan has, by what its groups do in it."""
        self._with_outputs: dict[Moments, str] = {}
        """Of steps that return the model's output, where they have an order of their own."""

    def check(self, program: StepProgram, graph: TrainingGraph, outputs: bool = False) -> None:
        """Raises `PlanMismatchError` where ranks, or batches of different shapes, would issue different collectives, or
        where ranks compute different things on batches of one shape. `outputs`: whether the step returns the model's
        output; where this gives another order, ranks compare that one, too."""
        moments = program.moments
        if outputs and self._hashes.get(moments, program.order_hash) != program.order_hash:
            if moments not in self._with_outputs:
                self._rendezvous.agree(f"steps with outputs {len(self._with_outputs)}", program.order_hash)
                self._with_outputs[moments] = program.order_hash
            if self._with_outputs[moments] == program.order_hash:
                return
        if moments not in self._hashes:
            if not self._hashes:
                self._rendezvous.agree("plan", self._plan.digest)
            kind = f" in its {len(self._hashes) + 1}. kind of step" if self._hashes else ""
            self._rendezvous.agree(f"order of collectives{kind}", program.order_hash)
            if not self._hashes:
                self._same_step(graph)
            self._hashes[moments] = program.order_hash
        elif program.order_hash != self._hashes[moments]:
            raise PlanMismatchError(
                "this batch leads to another order of collectives than the first one: ranks would exchange the wrong "
                "tensors. Does the model's structure depend on the batch?"
            )

    def is_its_own(self, program: StepProgram) -> bool:
        """Whether a step that returns the model's output issues its collectives in another order than without."""
        return program.order_hash != self._hashes.get(program.moments)

    def _same_step(self, graph: TrainingGraph) -> None:
        """Compares what ranks compute: on batches of one shape every operator and constant, else which operators
        there are, for views and constants may differ with the shape."""
        if self._rendezvous.group.world_size == 1 or graph.joint is None or graph.eager:
            return
        shapes, nodes, operators = _described(graph.joint.module.graph)
        texts = self._rendezvous.exchange("step", json.dumps([shapes, _digest(nodes), operators]))
        for rank, text in enumerate(texts):
            their_shapes, their_nodes, their_operators = json.loads(text)
            if their_shapes == shapes and their_nodes != _digest(nodes):
                differ = sorted(set(operators) ^ set(their_operators)) or ["a constant, as a probability or a factor"]
                raise PlanMismatchError(
                    f"rank {self._rendezvous.group.rank} and rank {rank} compute different things on batches of the "
                    f"same shapes; they differ in {', '.join(differ[:5])}. All ranks must build the same model, with "
                    "the same settings and loss"
                )


def _described(graph: torch.fx.Graph) -> tuple[list[str], list[str], list[str]]:
    """Shapes of the inputs; each node with its constants; the operators, less those that only look at memory."""
    shapes, nodes, operators = [], [], set()
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            shapes.append(f"{tuple(value.shape)} {value.dtype}")
        elif node.op == "call_function":
            nodes.append(f"{_name(node.target)} {_constants((node.args, node.kwargs))}")
            if not is_view(node):
                operators.add(_name(node.target))
    return shapes, nodes, sorted(operators)


def _name(target: Any) -> str:
    """An operator by name, without the address that it has in one process."""
    return str(getattr(target, "__qualname__", target)) if isinstance(target, FunctionType) else str(target)


def _constants(arguments: Any) -> str:
    return str(torch.fx.node.map_arg(arguments, lambda n: n.name))


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
