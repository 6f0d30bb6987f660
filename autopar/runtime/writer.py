"""Writes primitives into an FX graph: the second reader of a strategy's record, beside the cost model.

The joint graph's nodes are copied in order; behind each, the primitives placed there are written. A primitive of
which this rank has no part (another's update) writes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx

from autopar.ir.aliases import base, is_view, is_written, readers
from autopar.ir.capture import JointGraph
from autopar.ir.primitives import COLLECTIVES, WHOLE_STEP, Kind, Primitive
from autopar.ir.training_graph import Term, TrainingGraph
from autopar.runtime import collectives, head_writer, layer_writer, parts, row_writer, shard_writer
from autopar.runtime.fragments import Fragment, fragments, own_rows, pack
from autopar.runtime.late import Late
from autopar.runtime.modules import Clip, Store, Update
from autopar.runtime.optimizer import OptimizerPart
from autopar.runtime.process_group import Group as ProcessGroup
from autopar.strategies.base import Group, Member
from autopar.strategies.lowering import StepProgram

NARROW = (torch.float16, torch.bfloat16)

Written = torch.fx.Node | list[torch.fx.Node] | None

_WRITE = {
    "head": head_writer.write,
    "layer": layer_writer.write,
    "rows": row_writer.write,
    "shards": shard_writer.write,
}
"""What writes works of a strategy's own, by what their names begin with."""


@dataclass(frozen=True)
class Target:
    """What a graph is written for: this rank, its process group, and the live objects the primitives act on."""

    rank: int
    world_size: int
    group: ProcessGroup | None
    """The process group; `None` where nothing is sent."""
    parameters: dict[str, torch.nn.Parameter]
    shards: dict[str, torch.Tensor]
    """This rank's rows of the parameters that are spread over the ranks between steps, too."""
    part: Callable[[int, tuple[Fragment, ...]], OptimizerPart]
    """The optimizer over fragments of a sync group; called once per group, with its index."""
    max_norm: float | None = None
    late: Callable[[int, Store | None], Late] | None = None
    """What is on its way between two steps of a sync group; given its index, and what writes it into the parameters.
    `None` where nothing is."""
    compiled: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = lambda module: module
    """Compiles the compute of a finished graph; by default, leaves the graph as it is."""


class Writer:
    """Copies nodes of the joint graph, and writes the primitives that are placed between them."""

    is_last = True
    """Whether the batch is the last, or only, one of its step."""

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
        self.terms: dict[str, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
        """Of structured gradients whose parts are sent: left and right part of each term."""
        self.rows: dict[str, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
        """The same of tables whose rows are sent back to their owners."""
        self.counted: dict[int, torch.fx.Node] = {}
        self.asked: dict[tuple[int, int], torch.fx.Node] = {}
        """By group and exchange: which rows this rank wants."""
        self.counts: dict[tuple[int, int], torch.fx.Node] = {}
        """By group and exchange: how many rows each rank wants of each."""
        self.of_layers: dict[int, dict[str, torch.fx.Node]] = {}
        """By group: what the later works of a layer need of the earlier ones."""
        self.instead: dict[torch.fx.Node, dict[torch.fx.Node, torch.fx.Node]] = {}
        """What a node reads instead of some of its inputs."""
        self.scale: torch.fx.Node | None = None
        """What gradients are multiplied with as they are packed, where the backward pass did not scale them."""
        self.device = next((p.device for p in target.parameters.values()), torch.device("cpu"))
        self._consumed = {i for p in program.primitives for i in p.inputs if p.kind is not Kind.CLIP}

    def walk(self, nodes: Iterable[tuple[int, torch.fx.Node]]) -> None:
        """Copies `nodes`, given with their positions, and writes each primitive behind its own position. Primitives
        of the whole step go to `whole_step`."""
        placed = self.program.placed
        replaced = self.program.replaced
        by_node: dict[str, list[str]] = {}
        by_term: dict[str, list[tuple[str, Term]]] = {}
        resident = {m.slice.name for m in self.program.resident_members}
        for p in self.training.parameters:
            if p.gradient not in replaced:
                by_node.setdefault(p.gradient, []).append(p.name)
                continue
            # A resident parameter's gradient is formed from what heads are given, and from the rows of tables.
            structure = (p.table.parts if p.table is not None else None) if p.name in resident else p.parts
            for term in () if structure is None else structure.terms:
                by_term.setdefault(term.node, []).append((p.name, term))
        done = 0
        for position, node in nodes:
            while done < len(placed) and placed[done].position < position:
                self._primitive(placed[done].primitive)
                done += 1
            for name, term in by_term.get(node.name, ()):
                (self.rows if name in resident else self.terms).setdefault(name, []).append(self._term(term))
            if node.name in replaced:
                continue
            self.copy(node)
            for name in by_node.get(node.name, ()):
                own = self.copies[node]
                # Of what is gathered, the rows that this rank keeps are added to, once they are summed.
                self.gradients[name] = own if name in self.program.gathered else self.gradient(name, own)
        for rest in placed[done:]:
            self._primitive(rest.primitive)

    def gradient(self, name: str, node: torch.fx.Node) -> torch.fx.Node:
        """A parameter's local gradient, once it is complete; subclasses add to it."""
        return node

    def product(self, p: Primitive, name: str, node: torch.fx.Node) -> torch.fx.Node:
        """A gradient that is made as a `Product`: computed here, unless that may be done in pieces, as it is used."""
        if p.in_pieces and self.is_last and not self.has_earlier(name):
            return node
        return self.gradient(name, self.graph.call_method("whole", (node,)))

    def whole_step(self, p: Primitive) -> None:
        """Writes a primitive that belongs to no group: the sums of the weights and of the loss."""
        raise NotImplementedError

    def empty(self, p: Primitive) -> torch.fx.Node:
        """Memory for a primitive's whole value."""
        return self.call(torch.empty, (p.elements,), {"dtype": getattr(torch, p.dtype), "device": self.device})

    def sum_parts(self, p: Primitive, parts: torch.fx.Node) -> torch.fx.Node:
        """The sum of what a reduce-scatter has received, behind its wait `p`."""
        return self.call(collectives.sum_parts, (parts, self.summed_as(p)))

    def summed_as(self, p: Primitive) -> torch.dtype:
        """The dtype of that sum: the wire's where it is sent on, else the parameters'."""
        sent_on = any(q.kind in COLLECTIVES and p.index in q.inputs for q in self.program.primitives)
        return getattr(torch, p.dtype if sent_on else self._group(p).dtype)  # type: ignore[no-any-return]

    def clipped(self, p: Primitive) -> list[tuple[bool, Written]]:
        """What this rank holds of the gradients that are clipped; for each, whether no other rank holds it."""
        held = []
        for index in p.inputs:
            source = self.program.primitives[index]
            if source.held_elements(self.target.rank) and self.values[index] is not None:
                held.append((source.spread, self.values[index]))
        return held

    def compute(self) -> list[tuple[int, torch.fx.Node]]:
        """The joint graph's nodes, less placeholders and output, with their positions."""
        return list(enumerate(n for n in self.joint.module.graph.nodes if n.op not in ("placeholder", "output")))

    def _primitive(self, p: Primitive) -> None:
        if p.group == WHOLE_STEP and p.kind is not Kind.CLIP:
            self.whole_step(p)
            return
        value = self.values.get(p.inputs[0]) if p.inputs else None
        if p.kind is Kind.LET_GO or (p.late and p.kind is Kind.STORE):  # the latter is written by its wait
            return
        self.values[p.index] = getattr(self, f"_{p.kind.value}")(p, value)
        if p.late and p.kind is not Kind.WAIT:
            self.call_module(f"late_{p.group}", self._late(p), (self.values[p.index],))

    def _pack(self, p: Primitive, value: Written) -> Written:
        group = self._group(p)
        members = [self._member(m) for m in group.members if m.elements]
        if self.target.world_size == 1 or not members:
            return members if self.target.world_size == 1 else self.empty(p)
        if len(members) == 1 and group.dtype == p.dtype and self.scale is None:
            # One element wide, a slice stays strided as it is flattened, and gloo would sum it wrongly.
            own = torch.Tensor.contiguous if self._owns(group.members[0].slice.name) else torch.clone
            return self.call(own, (self.call(torch.Tensor.reshape, (members[0], (-1,))),))
        return self.call(pack, (members, getattr(torch, p.dtype), self.scale))

    def _member(self, member: Member) -> torch.fx.Node:
        gradient = self.gradients[member.slice.name]
        piece = member.slice
        if piece.whole:
            return gradient
        assert piece.start is not None and piece.stop is not None
        return self.call(torch.narrow, (gradient, piece.dim, piece.start, piece.stop - piece.start))

    def _owns(self, name: str) -> bool:
        """Whether a collective may overwrite a gradient: nobody else reads its memory."""
        node = self.gradient_source(name)
        while node.op == "call_function" and len(node.users) == 1:
            first = node.args[0] if node.args else None
            if node.target is operator.getitem and isinstance(first, torch.fx.Node) and not is_view(first):
                return True  # an element of an operator's results: memory of its own
            if not is_view(node):
                return True
            assert isinstance(first, torch.fx.Node)
            node = first
        return False

    def _term(self, term: Term) -> tuple[torch.fx.Node, torch.fx.Node]:
        """The parts of a term; copied where a later operator writes over them."""
        left, right = (self._kept(self.nodes[n], term.position) for n in (term.left, term.right))
        if term.offsets is not None:
            right = self.call(parts.bag_values, (right, left, self.copies[self.nodes[term.offsets]], term.mean))
        if term.left_transposed:
            left = self.call(torch.t, (left,))
        if term.right_transposed:
            right = self.call(torch.t, (right,))
        return left, right

    def _kept(self, node: torch.fx.Node, position: int) -> torch.fx.Node:
        if any(is_written(r, node) and self.position[r] > position for r in readers(base(node))):
            return self.call(torch.clone, (self.copies[node],))
        return self.copies[node]

    @cached_property
    def nodes(self) -> dict[str, torch.fx.Node]:
        """The joint graph's nodes by name."""
        return {n.name: n for n in self.joint.module.graph.nodes}

    @cached_property
    def position(self) -> dict[torch.fx.Node, int]:
        """Of each node that computes; the output lies behind all."""
        return {n: i for i, n in self.compute()}

    def has_earlier(self, name: str) -> bool:
        """Whether a gradient of earlier micro-batches is added to this parameter's."""
        return False

    def earlier_terms(self, name: str) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        """The parts of earlier micro-batches; subclasses add them."""
        return []

    def _count(self, p: Primitive, value: Written) -> Written:
        looked_up: list[list[torch.fx.Node] | None] = []
        rows: list[int | torch.fx.Node] = []
        for member in self._group(p).members:
            earlier = [left for left, _ in self.earlier_terms(member.slice.name)]
            if member.parts.kind == "rows":
                own = [self.copies[self.nodes[t.left]] for t in member.parts.terms]
                looked_up.append([*earlier, *own])
                rows.append(0)
            else:
                looked_up.append(None)
                rows.append(self.call(parts.rows_of, (member.parts.rows, earlier)))
        self.counted[p.group] = self.call(parts.count, (looked_up, rows, self.device))
        return self.call(getattr, (self.counted[p.group], "counts"))

    def _parts(self, p: Primitive, value: Written) -> Written:
        group = self._group(p)
        names = [m.slice.name for m in group.members]
        pairs = [[*self.earlier_terms(n), *self.terms[n]] for n in names]
        module = parts.Pack(group, getattr(torch, p.dtype), self.target.world_size)
        arguments = (self.counted[p.group], pairs, value, self.target.rank, self.scale)
        return self.call_module(f"parts_{p.group}", module, arguments)

    def _form(self, p: Primitive, value: Written) -> Written:
        group = self._group(p)
        wire = getattr(torch, self.program.primitives[p.inputs[0]].dtype)
        module = parts.Form(group, getattr(torch, p.dtype), wire, self.target.world_size, p.touched is not None)
        whole = self.call_module(f"form_{p.group}", module, (value, self.values[p.inputs[1]]))
        return [self.call(operator.getitem, (whole, i)) for i in range(len(group.members))]

    def _local(self, p: Primitive, value: Written) -> Written:
        whose, _, work = p.work.partition(".")
        return _WRITE[whose](self, p, work, [self.values[i] for i in p.inputs])

    def gradient_source(self, name: str) -> torch.fx.Node:
        parameter = self.training.by_name[name]
        return next(self.joint.gradients[n] for n in (name, *parameter.spec.ties) if n in self.joint.gradients)

    def _all_reduce(self, p: Primitive, value: Written) -> Written:
        return self.call(collectives.all_reduce, (value, self.channel(p)))

    def _served_sum(self, p: Primitive, value: Written) -> Written:
        assert self.target.group is not None, "nothing is sent without a process group"
        mesh = self.target.group.mesh(tuple(s.name for s in self.program.context.servers))
        return self.call(collectives.served_sum, (value, p.summed_by, mesh))

    def _reduce(self, p: Primitive, value: Written) -> Written:
        return self.call(collectives.reduce, (value, p.owner, self.channel(p)))

    def _broadcast(self, p: Primitive, value: Written) -> Written:
        if self.target.rank != p.owner:
            value = self.empty(p)
        return self.call(collectives.broadcast, (value, p.owner, self.channel(p)))

    def _reduce_scatter(self, p: Primitive, value: Written) -> Written:
        team = p.team_of(self.target.rank, self.target.world_size)
        splits, place = [p.splits[r] for r in team], team.index(self.target.rank)
        if p.ragged:
            return self.call(collectives.reduce_scatter_equal, (value, len(team), place, self.channel(p)))
        return self.call(collectives.reduce_scatter, (value, splits, place, self.channel(p)))

    def _all_gather(self, p: Primitive, value: Written) -> Written:
        team = p.team_of(self.target.rank, self.target.world_size)
        if p.ragged:
            return self.call(collectives.all_gather_equal, (value, len(team), self.channel(p)))
        splits, place = [p.splits[r] for r in team], team.index(self.target.rank)
        return self.call(collectives.all_gather, (value, splits, place, self.channel(p)))

    def _all_to_all(self, p: Primitive, value: Written) -> Written:
        assert isinstance(value, list), "a message is a flat value, with what goes to and comes from each rank"
        return self.call(collectives.all_to_all, (*value, self.channel(p)))

    def channel(self, p: Primitive | None = None) -> str | None:
        """The name of the process group in which this rank does a collective; without one, the one of all ranks."""
        if self.target.group is None:
            return None
        return self.target.group.name if p is None else self.target.group.channel(p.teams, p.lane)

    def _late(self, p: Primitive) -> Late:
        assert self.target.late is not None, "only a program with an optimizer has parameters on their way"
        return self.target.late(p.group, self._stores(p))

    def _wait(self, p: Primitive, value: Written) -> Written:
        if p.late:
            return self.call_module(f"late_{p.group}", self._late(p), ())
        done = self.call(collectives.wait, (value,))
        scattered = self.program.primitives[p.inputs[0]].kind is Kind.REDUCE_SCATTER
        return self.sum_parts(p, done) if scattered else done

    def _update(self, p: Primitive, value: Written) -> Written:
        group, held = self._group(p), p.held_elements(self.target.rank)
        sent = p.index in self._consumed
        if held == 0 and not (sent and p.splits):
            return self.empty(p) if sent and p.elements == 0 else None
        begin = sum(p.splits[: self.target.rank])
        if p.resident:
            pieces = own_rows(group, self.target.shards, self.target.rank, self.target.world_size)
        else:
            pieces = fragments(group, self.target.parameters, begin, begin + held)
        module = Update(self.target.part(p.group, pieces), getattr(torch, p.dtype) if sent else None)
        args = (value,) if self.target.max_norm is None else (value, self.clip)
        return self.call_module(f"update_{p.group}", module, args)

    def _deliver(self, p: Primitive, value: Written) -> Written:
        raise NotImplementedError("only a program without an optimizer delivers gradients")

    def _store(self, p: Primitive, value: Written) -> Written:
        return self.call_module(f"store_{p.group}", s, (value,)) if (s := self._stores(p)) is not None else None

    def _stores(self, p: Primitive) -> Store | None:
        """What writes a received value into the parameters; `None` where this rank has sent it."""
        if self._owner_of(p) == self.target.rank:
            return None
        return Store(fragments(self._group(p), self.target.parameters))

    def _owner_of(self, p: Primitive) -> int | None:
        """The rank that already holds what is stored: the owner, where the value came by broadcast."""
        while p.kind is not Kind.BROADCAST and p.inputs:
            p = self.program.primitives[p.inputs[0]]
        return p.owner if p.kind is Kind.BROADCAST else None

    def _clip(self, p: Primitive, value: Written) -> Written:
        assert self.target.max_norm is not None
        held = self.clipped(p)
        shared = any(self.program.primitives[i].spread for i in p.inputs)
        module = Clip(self.target.max_norm, [o for o, _ in held], self.channel() if shared else None, self.device)
        self.clip = self.call_module("clip", module, ([value for _, value in held],))
        return self.clip

    def _group(self, p: Primitive) -> Group:
        return self.program.groups[p.group]

    def copy(self, node: torch.fx.Node) -> None:
        instead = self.instead.get(node, {})
        self.copies[node] = self.graph.node_copy(node, lambda n: instead[n] if n in instead else self.copies[n])

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def call_module(self, name: str, module: torch.nn.Module, args: tuple[Any, ...]) -> torch.fx.Node:
        self.modules[name] = module
        return self.graph.call_module(name, args)

    def module(self, name: str) -> torch.fx.GraphModule:
        """The graph as a module, with the constants and submodules that it refers to."""
        root: dict[str, Any] = dict(self.modules)
        for node in self.graph.find_nodes(op="get_attr"):
            if node.target not in root:
                root[str(node.target)] = getattr(self.joint.module, str(node.target))
        self.graph.lint()
        return self.target.compiled(torch.fx.GraphModule(root, self.graph, class_name=name))
