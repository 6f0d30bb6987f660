"""Writes the graph of one whole training step: forward, backward, synchronization and update."""

from __future__ import annotations

import operator

import torch
import torch.fx

from autopar.backends import collectives
from autopar.errors import PlanError
from autopar.ir.training_graph import TrainingGraph
from autopar.ops import parts
from autopar.ops.base import Call
from autopar.runtime.loss_scale import Scaled
from autopar.runtime.model.outputs import NO_OUTPUT
from autopar.runtime.writer import NARROW, Target, Writer
from autopar.strategies.lowering import StepProgram


class StepWriter(Writer):
    """Writes a step over one batch, or over the last of several micro-batches."""

    def __init__(self, graph: TrainingGraph, program: StepProgram, target: Target) -> None:
        super().__init__(graph, program, target)
        self.loss_source = self.joint.outputs[0]
        self.earlier: dict[str, torch.fx.Node] = {}
        self.tangent: torch.fx.Node | None = None
        self.share: torch.fx.Node | None = None
        self.earlier_loss: torch.fx.Node | None = None
        self.loss: torch.fx.Node | None = None

    def write(self, accumulated: bool = False) -> torch.fx.GraphModule:
        """The step as a module from tensors to the loss; where the model's output is asked for, to it and a list of the
        output's tensors.

        Placeholders are those of the joint graph, in order, but the tangent; then, with several ranks, `weight` and
        `total_weight`, float64: how much this batch, and this rank's whole step, count, the latter followed by the
        number of the optimizer's settings. With one rank, or with `accumulated`, the tangent stands in their place.
        With `accumulated` there follow the gradients of the earlier micro-batches, this batch's `share` of the global
        batch, and the earlier ones' part of the global loss; with one rank, the loss that is returned is still this
        batch's alone. The order of collectives is the same either way, so ranks may differ in their number of
        micro-batches.
        """
        own_share = self.target.world_size > 1 and not accumulated
        inputs = self.joint.module.graph.find_nodes(op="placeholder")
        for node, (kind, _) in zip(inputs, self.joint.inputs, strict=True):
            if kind == "tangent":
                self.tangent = node
            else:
                self.copy(node)
        assert self.tangent is not None
        if own_share:
            self.weight, self.total_weight = self.graph.placeholder("weight"), self.graph.placeholder("total_weight")
        else:
            self.copy(self.tangent)
        if accumulated:
            self.earlier = {
                p.name: self.graph.placeholder(f"earlier_{i}") for i, p in enumerate(self.training.parameters)
            }
            self.share, self.earlier_loss = self.graph.placeholder("share"), self.graph.placeholder("earlier_loss")
        self.walk(self.compute())
        for name, value in self.joint.mutations:
            buffer = inputs[self.joint.inputs.index(("buffer", name))]
            self.call(torch.ops.aten.copy_.default, (self.copies[buffer], self.copies[value]))
        loss = self.copies[self.loss_source] if self.loss is None else self.loss
        self.graph.output((loss, outputs_of(self)) if len(self.joint.outputs) > 1 else loss)
        return self.module("Step")

    def gradient(self, name: str, node: torch.fx.Node) -> torch.fx.Node:
        if name not in self.earlier:
            return node
        return self.call(torch.ops.aten.add.Tensor, (node, self.earlier[name]))

    def has_earlier(self, name: str) -> bool:
        return name in self.earlier

    def earlier_terms(self, name: str) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        if name not in self.earlier:
            return []
        return [
            (self.call(operator.getitem, (self.earlier[name], 0)), self.call(operator.getitem, (self.earlier[name], 1)))
        ]

    def begin_step_sum(self, of: str) -> torch.fx.Node | None:
        """The sum of the weights, unless it is known already; then that of the losses."""
        if of == "weight":
            if self.earlier_loss is not None:
                return None
            return self.call(collectives.all_reduce_copy, (self.total_weight, self.channel()))
        assert self.share is not None
        part = self.call(loss_share, (self.copies[self.loss_source], self.share))
        if self.earlier_loss is not None:
            part = self.call(torch.add, (part, self.earlier_loss))
        return self.call(collectives.all_reduce, (part, self.channel()))

    def end_step_sum(self, of: str, value: torch.fx.Node | None) -> torch.fx.Node | None:
        if value is None:
            return None
        total = self.call(collectives.wait, (value,))
        if of == "loss":
            self.loss = total
            return total
        if self.target.same_settings is None:
            total = self.call(operator.getitem, (total, 0))
        else:
            total = self.call_module("same_settings", self.target.same_settings, (total,))
        assert self.tangent is not None
        dtype = self.tangent.meta["val"].dtype
        narrow = dtype in NARROW
        wide = torch.float32 if narrow else dtype
        self.share = self.call(batch_share, (self.weight, total, wide, self.target.world_size))
        if narrow:  # a share rounded to 16 bits would scale every gradient by the same error: scale them later
            self.scale = self.share
            shape = tuple(self.tangent.meta["val"].shape)
            self.copies[self.tangent] = self._scaled(self.call(one_or_none, (self.share, shape, dtype)), False)
            if self.loss_scale is not None:
                self.scale = self.call(torch.mul, (self.share, self.target.world_size))
        elif self.loss_scale is not None:
            self.copies[self.tangent] = self._scaled(self.share, True)
        else:
            self.copies[self.tangent] = self.share
            if self.tangent.meta["val"].dim() == 0:
                self.share.meta["val"] = self.tangent.meta["val"]
        return total

    def _scaled(self, seed: torch.fx.Node, by_ranks: bool) -> torch.fx.Node:
        if self.loss_scale is None:
            return seed
        return self.call_module("loss_scale", Scaled(self.loss_scale, by_ranks), (seed,))


class LocalWriter(Writer):
    """Writes the forward and backward pass of a micro-batch that is not the last one: no gradient is synchronized."""

    is_last = False

    def write(self) -> torch.fx.GraphModule:
        """The step as a module from the joint graph's inputs to the loss, the output's tensors where they are asked
        for, the buffers' new values in the order of `JointGraph.mutations`, and each parameter's gradient, or the parts
        that it is made of, by name."""
        for node in self.joint.module.graph.find_nodes(op="placeholder"):
            self.copy(node)
        self.walk(self.compute())
        gradients: dict[str, torch.fx.Node] = dict(self.gradients)
        for name, terms in self._terms.items():
            gradients[name] = self.call(parts.joined, ([a for a, _ in terms], [b for _, b in terms]))
        buffers = [self.copies[value] for _, value in self.joint.mutations]
        self.graph.output((self.copies[self.joint.outputs[0]], outputs_of(self), buffers, gradients))
        return self.module("Local")

    def write_call(self, call: Call) -> None:
        """Only what the graph cannot be computed without."""
        needed = call.group is not None and call.group.index in self.program.sharded and not call.op.changes_parameters
        if needed or (call.completes_step_before and call.op.waits_for(call) is not None):
            super().write_call(call)

    def gradient(self, name: str, node: torch.fx.Node) -> torch.fx.Node:
        self.gradients[name] = node
        return node


def outputs_of(writer: Writer) -> list[torch.fx.Node]:
    """The tensors of the model's output, where the step returns them; raises `PlanError` where no rank has one."""
    wanted = writer.joint.outputs[1:]
    if any(n not in writer.copies for n in wanted):
        raise PlanError(NO_OUTPUT)
    return [writer.copies[n] for n in wanted]


def loss_share(loss: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """This batch's part of the global loss, float64; a batch of weight 0 has none, whatever its loss."""
    return torch.where(share == 0, 0.0, loss.double().reshape(()) * share)


def batch_share(
    weight: torch.Tensor, global_weight: torch.Tensor, dtype: torch.dtype, batches: int = 1
) -> torch.Tensor:
    """What the backward pass starts from: this batch's share of the global batch. Where nothing counts in any of the
    `batches`, all have equal shares: their losses are then what one process would have, NaN or 0, and gradients 0."""
    return torch.where(global_weight == 0, 1 / batches, weight / global_weight).to(dtype)


def one_or_none(share: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What the backward pass starts from where gradients are scaled later: 1, or 0 for a batch without a share."""
    return (share != 0).to(dtype).expand(shape).clone()
