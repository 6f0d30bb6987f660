"""Writes a module's forward and backward pass as two graphs: the second synchronizes gradients as they complete."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.fx

from autopar.backends import collectives
from autopar.ir.sizes import size_inputs
from autopar.ir.stand_in import StandIn
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.base import Call
from autopar.ops.gradients import cut
from autopar.runtime.step_writer import batch_share
from autopar.runtime.writer import NARROW, Target, Writer
from autopar.strategies.lowering import StepProgram


class _Half(Writer):
    def __init__(self, graph: TrainingGraph, program: StepProgram, target: Target) -> None:
        super().__init__(graph, program, target)
        placeholders = self.joint.module.graph.find_nodes(op="placeholder")
        self.inputs = dict(zip(placeholders, self.joint.inputs, strict=True))
        self.tangents = [n for n, (kind, _) in self.inputs.items() if kind == "tangent"]
        late: set[torch.fx.Node] = set(self.tangents)
        for _, node in self.compute():
            if not late.isdisjoint(node.all_input_nodes):
                late.add(node)
        self.late = late
        """Nodes of the backward pass: those that depend on a tangent."""
        first = [n for n in self.joint.module.graph.nodes if n not in late and n.op != "output"]
        sizes = size_inputs(self.joint)
        self.saved = [n for n in first if n in sizes or any(u in late for u in n.users if u.op != "output")]
        """Values of the forward pass that the backward pass reads, parameters among them."""


class ForwardWriter(_Half):
    """From parameters, buffers and batch to the model's outputs, followed by the values to save."""

    def write(self) -> torch.fx.GraphModule:
        for node in self.inputs:
            if node not in self.late:
                self.copy(node)
        for _, node in self.compute():
            if node not in self.late:
                self.copy(node)
        outputs = [self.copies[n] for n in (*self.joint.outputs, *self.saved)]
        for name, value in self.joint.mutations:
            buffer = next(n for n, key in self.inputs.items() if key == ("buffer", name))
            self.call(torch.ops.aten.copy_.default, (self.copies[buffer], self.copies[value]))
        self.graph.output(tuple(outputs))
        return self.module("Forward")


class BackwardWriter(_Half):
    """From saved values and tangents to the gradients, in the order of `TrainingGraph.parameters`."""

    def __init__(
        self,
        graph: TrainingGraph,
        program: StepProgram,
        target: Target,
        silent: Collection[torch.fx.Node] = frozenset(),
        counts: bool = True,
    ) -> None:
        """`silent`: nodes of the backward pass whose values are zeros, whatever they compute. `counts`: whether this
        rank's batch counts as something; else its gradients may be no numbers, and are zeros to all ranks, unless
        nothing counts on any rank."""
        super().__init__(graph, program, target)
        self.silent = silent
        self.counts = counts
        self.earlier: dict[str, torch.fx.Node] = {}
        self.is_left_out: torch.fx.Node | None = None
        """Of a batch that counts as nothing: whether another rank's counts, so that this one's gradients are zeros."""
        self.share: torch.fx.Node | None = None
        """What the tangents were multiplied with, where they were."""
        self.sums: torch.fx.Node | None = None
        """What is summed over the ranks before the backward pass: weights, and who has which gradients."""
        self.delivered: dict[str, list[tuple[int, int, torch.fx.Node]]] = {}

    def write(self, accumulated: bool = False) -> torch.fx.GraphModule:
        """Synchronized gradients, and behind them, with several ranks, the sums of `totals` over them. After the saved
        values and tangents come, with several ranks, `weight` and `totals`, float64; with `accumulated`, the weighted
        sums of the gradients that were not synchronized yet. `totals`: how much this rank's micro-batches since the
        last synchronization count, and how many they are; others may follow that are summed with these. The sums are
        not handed out of a model that runs eagerly."""
        self._begin()
        if self.target.world_size > 1:
            self.weight, self.totals = self.graph.placeholder("weight"), self.graph.placeholder("totals")
        if accumulated:
            self.earlier = {
                p.name: self.graph.placeholder(f"earlier_{i}") for i, p in enumerate(self.training.parameters)
            }
        self.walk(self._late_compute())
        sums = () if self.sums is None else (self.sums,)
        self.graph.output((*(self._whole(p.name) for p in self.training.parameters), *self._of_inputs(), *sums))
        return self.module("Backward")

    def write_local(self) -> torch.fx.GraphModule:
        """This rank's own gradients, unsynchronized."""
        self._begin()
        for _, node in self._late_compute():
            self.copy(node)
        own = [self.copies[self.gradient_source(p.name)] for p in self.training.parameters]
        self.graph.output((*own, *self._of_inputs()))
        return self.module("LocalBackward")

    def _of_inputs(self) -> list[torch.fx.Node]:
        """Gradients of the inputs that require one, of this rank's own loss: not scaled by its share of the batch."""
        found = [self.copies[n] for n in self.joint.input_gradients.values()]
        if self.share is None:
            return found
        return [self.call(unscaled, (n, self.share)) for n in found]

    def _begin(self) -> None:
        for i, node in enumerate(self.saved):
            self.copies[node] = self.graph.placeholder(f"saved_{i}")
            self.copies[node].meta["val"] = node.meta["val"]
        for node in self.tangents:
            self.copy(node)

    def _late_compute(self) -> Iterable[tuple[int, torch.fx.Node]]:
        return ((i, n) for i, n in self.compute() if n in self.late)

    def copy(self, node: torch.fx.Node) -> None:
        super().copy(node)
        if node in self.silent:
            self.copies[node] = self.call(torch.ops.aten.zeros_like.default, (self.copies[node],))
            self.copies[node].meta["val"] = node.meta["val"]

    def gradient(self, name: str, node: torch.fx.Node) -> torch.fx.Node:
        node = self._counted(node)
        if name not in self.earlier:
            return node
        if self.target.world_size == 1:  # where no gradient counts more than another
            return self.call(torch.add, (node, self.earlier[name]))
        if self.scale is not None:  # all is divided by the global weight later
            return self.call(torch.addcmul, (self.earlier[name], node, self.own_weight))
        return self.call(torch.addcmul, (node, self.earlier[name], self.per_weight))

    def _counted(self, value: torch.fx.Node) -> torch.fx.Node:
        """A value, or zeros where this rank's gradients are to be: NaN times a share of 0 is NaN."""
        if self.is_left_out is None:
            return value
        found = self.call(torch.where, (self.is_left_out, 0.0, value))
        found.meta["val"] = value.meta["val"]
        return found

    def begin_step_sum(self, of: str) -> torch.fx.Node:
        return self.call(collectives.all_reduce_copy, (self.totals, self.channel()))

    def end_step_sum(self, of: str, value: torch.fx.Node) -> None:
        sums = self.call(collectives.wait, (value,))
        if not self.training.eager or isinstance(self.joint, StandIn):
            self.sums = sums
        total = self.call(operator.getitem, (sums, 0))
        count = self.call(torch.div, (self.call(operator.getitem, (sums, 1)), self.target.world_size))
        if not self.counts:
            self.is_left_out = self.call(torch.ne, (total, 0))
            self.copies |= {t: self._counted(self.copies[t]) for t in self.tangents}
        dtypes = {t.meta["val"].dtype for t in self.tangents}
        counted = self.call(torch.mul, (self.weight, count))
        if dtypes & set(NARROW) or self.training.eager:  # an eager backward pass has begun, at the user's own loss
            scaled, wide = (
                count if self.earlier else counted,
                torch.float64 if self.training.eager else torch.float32,
            )
            self.scale = self.call(batch_share, (scaled, total, wide, self.target.world_size))
            self.own_weight = self.call(torch.Tensor.to, (self.weight, wide))
            return
        self.share = self.call(torch.div, (counted, total))
        for tangent in self.tangents:
            share = self.call(batch_share, (counted, total, tangent.meta["val"].dtype, self.target.world_size))
            self.copies[tangent] = self.call(torch.mul, (self.copies[tangent], share))
            self.copies[tangent].meta["val"] = tangent.meta["val"]
        self.per_weight = self.call(batch_share, (count, total, next(iter(dtypes))))

    def deliver(self, call: Call, value: Any) -> None:
        offset = 0
        of_members = iter(value) if isinstance(value, list) else None
        for member in call.members:
            if not member.elements:  # which nobody sends
                piece = cut(self, member)
            elif of_members is not None:
                piece = next(of_members)
            else:
                flat = self.call(torch.narrow, (value, 0, offset, member.elements))
                if call.dtype != call.inputs[0].dtype:
                    flat = self.call(torch.Tensor.to, (flat, call.torch_dtype))
                piece = self.call(torch.Tensor.view, (flat, member.shape))
            if self.max_norm is not None:
                piece = self.call(torch.mul, (piece, self.value_of(call.inputs[1])))
            self.delivered.setdefault(member.slice.name, []).append((member.slice.start or 0, member.slice.dim, piece))
            offset += member.elements

    def _whole(self, name: str) -> torch.fx.Node:
        pieces = sorted(self.delivered[name], key=lambda x: x[0])
        if len(pieces) == 1:
            return pieces[0][2]
        return self.call(torch.cat, ([piece for _, _, piece in pieces], pieces[0][1]))


def unscaled(gradient: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The gradient of a rank's own loss, from that of its share of the global one; zeros where the rank has none."""
    return torch.where(share == 0, 0.0, gradient / share.clamp(min=torch.finfo(share.dtype).tiny)).to(gradient.dtype)
