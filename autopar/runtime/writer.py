"""Writes a lowered step into an FX graph: the second reader of a strategy's primitives, beside the cost model.

The joint graph's nodes are copied in order; behind each, the primitives placed there are written. A primitive of
which this rank has no part (another's update) writes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from autopar.ir.aliases import is_view
from autopar.ir.capture import JointGraph
from autopar.ir.primitives import WHOLE_STEP, Kind, Primitive
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime import collectives
from autopar.runtime.fragments import Fragment, fragments, pack
from autopar.runtime.modules import Clip, Store, Update
from autopar.runtime.optimizer import OptimizerPart
from autopar.strategies.base import Group, Member
from autopar.strategies.lowering import StepProgram

_NARROW = (torch.float16, torch.bfloat16)

Written = torch.fx.Node | list[torch.fx.Node] | None


@dataclass(frozen=True)
class Target:
    """What a graph is written for: this rank, its process group, and the live objects the primitives act on."""

    rank: int
    world_size: int
    group: str | None
    """Name of the process group; `None` with one rank."""
    parameters: dict[str, torch.nn.Parameter]
    part: Callable[[int, tuple[Fragment, ...]], OptimizerPart]
    """The optimizer over fragments of a sync group; called once per group, with its index."""
    max_norm: float | None = None


class StepWriter:
    """Writes the graph of one whole training step, optimizer included."""

    def __init__(self, graph: TrainingGraph, program: StepProgram, target: Target) -> None:
        assert graph.joint is not None, "only a graph that was captured can be written"
        self.joint: JointGraph = graph.joint
        self.training = graph
        self.program = program
        self.target = target
        self.graph = torch.fx.Graph()
        self.modules: dict[str, torch.nn.Module] = {}
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.values: dict[int, Written] = {}
        self.gradients: dict[str, torch.fx.Node] = {}
        self.scale: torch.fx.Node | None = None
        self.seed: torch.fx.Node | None = None
        self._device = next(iter(target.parameters.values())).device
        self._consumers = {p.inputs[0]: p for p in program.primitives if len(p.inputs) == 1}

    def write(self, accumulated: bool = False) -> torch.fx.GraphModule:
        """Placeholders: the joint graph's, less its tangent; then `weight` and `total_weight`, the batch's and the
        step's on this rank. With `accumulated`: the tangent instead of the weights, then one gradient a parameter
        from earlier micro-batches. With one rank: the tangent, and no weights. Returns the loss."""
        source = self.joint.module.graph
        own_seed = self.target.world_size > 1 and not accumulated
        for node, (kind, _) in zip(source.find_nodes(op="placeholder"), self.joint.inputs, strict=True):
            if kind == "tangent" and own_seed:
                self.tangent = node
                continue
            self._copy(node)
        if own_seed:
            # float64, as both are counts and their quotient scales every gradient
            self.weight = self.graph.placeholder("weight")
            self.total_weight = self.graph.placeholder("total_weight")
        earlier = {p.name: self.graph.placeholder(f"earlier_{i}") for i, p in enumerate(self.training.parameters)
                   } if accumulated else {}
        placed = iter(self.program.placed)
        upcoming = next(placed, None)
        compute = [n for n in source.nodes if n.op not in ("placeholder", "output")]
        by_node = {}
        for p in self.training.parameters:
            by_node.setdefault(p.gradient, []).append(p.name)
        loss_source = self.joint.outputs[0]
        for i, node in enumerate([None, *compute]):
            if node is not None:
                self._copy(node)
                for name in by_node.get(node.name, ()):
                    gradient = self.copies[node]
                    if name in earlier:
                        gradient = self._call(torch.ops.aten.add.Tensor, (gradient, earlier[name]))
                    self.gradients[name] = gradient
            while upcoming is not None and upcoming.position == i - 1:
                self._primitive(upcoming.primitive, loss_source, own_seed)
                upcoming = next(placed, None)
        for name, value in self.joint.mutations:
            buffer = self.copies[self._placeholder("buffer", name)]
            self._call(torch.ops.aten.copy_.default, (buffer, self.copies[value]))
        loss = self.loss if self.target.world_size > 1 and own_seed else self.copies[loss_source]
        self.graph.output(loss)
        return self._module(self.joint.module)

    def _primitive(self, p: Primitive, loss: torch.fx.Node, own_seed: bool) -> None:
        if p.group == WHOLE_STEP and p.kind is not Kind.CLIP:
            if own_seed:
                self._weight_or_loss(p, loss)
            return
        value = self.values.get(p.inputs[0]) if p.inputs else None
        self.values[p.index] = getattr(self, f"_{p.kind.value}")(p, value)

    def _weight_or_loss(self, p: Primitive, loss: torch.fx.Node) -> None:
        assert self.target.group is not None
        if p.kind is Kind.WAIT:
            node = self._call(collectives.wait, (self.values[p.inputs[0]],))
            if p.stage == 0:
                dtype = self.tangent.meta["val"].dtype
                self.seed = self._call(_seed, (self.weight, node, dtype if dtype not in _NARROW else torch.float32))
                if dtype in _NARROW:  # a share rounded to 16 bits would scale every gradient by the same error
                    self.scale = self.seed
                    self.copies[self.tangent] = self._call(torch.ones, ((),), {"dtype": dtype, "device": self._device})
                else:
                    self.copies[self.tangent] = self.seed
            else:
                self.loss = node
        elif self.seed is None:
            self.values[p.index] = self._call(_all_reduce_copy, (self.total_weight, self.target.group))
        else:
            share = self._call(_loss_share, (self.copies[loss], self.seed))
            self.values[p.index] = self._call(collectives.all_reduce, (share, self.target.group))

    def _pack(self, p: Primitive, value: Written) -> Written:
        group = self._group(p)
        members = [self._member(m) for m in group.members]
        if self.target.world_size == 1:
            return members
        if len(members) == 1 and group.dtype == p.dtype and self.scale is None:
            flat = self._call(torch.Tensor.reshape, (members[0], (-1,)))
            return flat if self._owns(group.members[0].slice.name) else self._call(torch.clone, (flat,))
        return self._call(pack, (members, getattr(torch, p.dtype), self.scale))

    def _member(self, member: Member) -> torch.fx.Node:
        gradient = self.gradients[member.slice.name]
        piece = member.slice
        if piece.whole:
            return gradient
        assert piece.start is not None and piece.stop is not None
        return self._call(torch.narrow, (gradient, piece.dim, piece.start, piece.stop - piece.start))

    def _owns(self, name: str) -> bool:
        """Whether a collective may overwrite a gradient: nobody else reads its memory."""
        node = self._gradient_source(name)
        while node.op == "call_function" and len(node.users) == 1:
            first = node.args[0] if node.args else None
            if node.target is operator.getitem and isinstance(first, torch.fx.Node) and not is_view(first):
                return True  # an element of an operator's results: memory of its own
            if not is_view(node):
                return True
            assert isinstance(first, torch.fx.Node)
            node = first
        return False

    def _gradient_source(self, name: str) -> torch.fx.Node:
        parameter = self.training.by_name[name]
        return next(self.joint.gradients[n] for n in (name, *parameter.spec.ties) if n in self.joint.gradients)

    def _all_reduce(self, p: Primitive, value: Written) -> Written:
        return self._call(collectives.all_reduce, (value, self.target.group))

    def _reduce(self, p: Primitive, value: Written) -> Written:
        return self._call(collectives.reduce, (value, p.owner, self.target.group))

    def _broadcast(self, p: Primitive, value: Written) -> Written:
        if self.target.rank != p.owner:
            value = self._call(torch.empty, (p.elements,), {"dtype": getattr(torch, p.dtype), "device": self._device})
        return self._call(collectives.broadcast, (value, p.owner, self.target.group))

    def _reduce_scatter(self, p: Primitive, value: Written) -> Written:
        return self._call(collectives.reduce_scatter, (value, p.splits, self.target.rank, self.target.group))

    def _all_gather(self, p: Primitive, value: Written) -> Written:
        return self._call(collectives.all_gather, (value, p.splits, self.target.group))

    def _wait(self, p: Primitive, value: Written) -> Written:
        done = self._call(collectives.wait, (value,))
        source = self.program.primitives[p.inputs[0]]
        if source.kind is Kind.REDUCE_SCATTER:
            dtype = getattr(torch, self._group(p).dtype)
            return self._call(collectives.sum_parts, (done, self.target.world_size, dtype))
        return done

    def _update(self, p: Primitive, value: Written) -> Written:
        group, held = self._group(p), p.held_elements(self.target.rank)
        sent = p.index in self._consumers and self.target.world_size > 1
        if held == 0 and not (sent and p.splits):
            return None
        begin = sum(p.splits[: self.target.rank])
        parts = fragments(group, self.target.parameters, begin, begin + held)
        module = Update(self.target.part(p.group, parts), getattr(torch, p.dtype) if sent else None)
        args = (value,) if self.target.max_norm is None else (value, self.clip)
        return self._call_module(f"update_{p.group}", module, args)

    def _store(self, p: Primitive, value: Written) -> Written:
        source = self._owner_of(p)
        if source == self.target.rank:
            return None
        module = Store(fragments(self._group(p), self.target.parameters))
        return self._call_module(f"store_{p.group}", module, (value,))

    def _owner_of(self, p: Primitive) -> int | None:
        """The rank that already holds what is stored: the owner, where the value came by broadcast."""
        while p.inputs:
            p = self.program.primitives[p.inputs[0]]
            if p.kind is Kind.BROADCAST:
                return p.owner
        return None

    def _clip(self, p: Primitive, value: Written) -> Written:
        assert self.target.max_norm is not None
        once, held = [], []
        for index in p.inputs:
            source = self.program.primitives[index]
            if source.held_elements(self.target.rank) and self.values[index] is not None:
                once.append(bool(source.splits) or source.owner is not None)
                held.append(self.values[index])
        shared = any(
            self.program.primitives[i].splits or self.program.primitives[i].owner is not None for i in p.inputs
        )
        module = Clip(self.target.max_norm, once, self.target.group if shared else None, self._device)
        self.clip = self._call_module("clip", module, (held,))
        return self.clip

    def _group(self, p: Primitive) -> Group:
        return self.program.groups[p.group]

    def _placeholder(self, kind: str, key: str) -> torch.fx.Node:
        index = self.joint.inputs.index((kind, key))
        return self.joint.module.graph.find_nodes(op="placeholder")[index]  # type: ignore[no-any-return]

    def _copy(self, node: torch.fx.Node) -> None:
        self.copies[node] = self.graph.node_copy(node, lambda n: self.copies[n])

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def _call_module(self, name: str, module: torch.nn.Module, args: tuple[Any, ...]) -> torch.fx.Node:
        self.modules[name] = module
        return self.graph.call_module(name, args)

    def _module(self, source: torch.fx.GraphModule) -> torch.fx.GraphModule:
        root: dict[str, Any] = dict(self.modules)
        for node in self.graph.find_nodes(op="get_attr"):
            root[str(node.target)] = getattr(source, str(node.target))
        self.graph.lint()
        return torch.fx.GraphModule(root, self.graph, class_name="Step")


def _all_reduce_copy(x: torch.Tensor, group: str) -> torch.Tensor:
    return collectives.all_reduce(x.clone(), group)


def _seed(weight: torch.Tensor, global_weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the backward pass starts from: this batch's share of the global batch."""
    return (weight / global_weight).to(dtype)


def _loss_share(loss: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """This batch's share of the global loss; a batch of weight 0 has none, whatever its loss."""
    return torch.where(seed == 0, 0.0, loss.double() * seed)

