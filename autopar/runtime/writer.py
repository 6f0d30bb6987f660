"""Writes a step's operations into an FX graph: the second reader of a strategy's record, beside the cost model.

The joint graph's nodes are copied in order; behind each, the calls placed there are written. A call of which this rank
has no part (another's update) writes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import torch.fx

from autopar.backends import collectives
from autopar.ir.aliases import base, is_view, is_written, readers, repeats_memory
from autopar.ir.capture import JointGraph
from autopar.ir.sizes import size_of
from autopar.ir.training_graph import Term, TrainingGraph
from autopar.ops import parts
from autopar.ops.base import Call, Site
from autopar.ops.fragments import Fragment, fragments
from autopar.ops.group import Group
from autopar.ops.layouts import Varying
from autopar.ops.subgroups import Subgroups
from autopar.ops.updates import OptimizerPart, Received
from autopar.runtime.deferred import Deferred
from autopar.runtime.job.process_group import Group as ProcessGroup
from autopar.runtime.looks import Look
from autopar.runtime.loss_scale import LossScale
from autopar.strategies.lowering import StepProgram

NARROW = (torch.float16, torch.bfloat16)

CALL = "autopar_call"
"""Under this, nodes that a call has written keep it, and whether their value is the call's."""


@dataclass(frozen=True)
class Target:
    """What a graph is written for: this rank, its process group, and the live objects that operations act on."""

    rank: int
    world_size: int
    group: ProcessGroup | None
    """The process group; `None` where nothing is sent."""
    parameters: dict[str, torch.nn.Parameter]
    shards: dict[str, torch.Tensor] = field(default_factory=dict)
    """This rank's rows of the parameters that are sharded between steps, too."""
    part: Callable[[int, tuple[Fragment, ...]], OptimizerPart] | None = None
    """The optimizer over fragments of a sync group; called once per group, with its index. `None` where nothing is
    updated."""
    max_norm: float | None = None
    loss_scale: LossScale | None = None
    """What multiplies the loss of each step; `None` where nothing does."""
    deferred: Callable[[int, Received | None], Deferred] | None = None
    """What is on its way between two steps of a sync group; given its index, and what writes it into the parameters.
    `None` where nothing is."""
    state: Callable[[Call, str], torch.Tensor] | None = None
    """This rank's part of a state that lives from step to step. `None` where nothing does."""
    same_settings: torch.nn.Module | None = None
    """Compares the settings of the optimizer as they arrive with the sum of the weights; `None` where nobody does."""
    compiled: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = lambda module: module
    """Compiles the compute of a finished graph; by default, leaves the graph as it is."""


class Held(torch.nn.Module):
    """A tensor that lives from step to step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self) -> torch.Tensor:
        return self.tensor


class Writer(Site):
    """Copies nodes of the joint graph, and writes the calls that are placed between them."""

    def __init__(self, graph: TrainingGraph, program: StepProgram, target: Target) -> None:
        assert graph.joint is not None, "only a graph that was captured can be written"
        self.joint: JointGraph = graph.joint
        self.training = graph
        self.program = program
        self.target = target
        self.rank, self.world_size, self.max_norm = target.rank, target.world_size, target.max_norm
        self.loss_scale = target.loss_scale
        self.parameters, self.shards = target.parameters, target.shards
        self.device = next((p.device for p in target.parameters.values()), torch.device("cpu"))
        self.graph = torch.fx.Graph()
        self.modules: dict[str, torch.nn.Module] = {}
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.values: dict[int, Any] = {}
        self.gradients: dict[str, torch.fx.Node] = {}
        self._terms: dict[str, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
        """Of structured gradients whose parts are sent: left and right part of each term."""
        self._rows: dict[str, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
        """The same of tables whose rows are sent back to their owners."""
        self._notes: dict[int, dict[Any, Any]] = {}
        self._instead: dict[torch.fx.Node, dict[torch.fx.Node, torch.fx.Node]] = {}
        """What a node reads instead of some of its inputs."""

    def walk(self, nodes: Iterable[tuple[int, torch.fx.Node]]) -> None:
        """Copies `nodes`, given with their positions, and writes each call behind its own position."""
        placed = self.program.placed
        replaced = self.program.replaced
        by_node: dict[str, list[str]] = {}
        by_term: dict[str, list[tuple[str, Term]]] = {}
        sharded = {m.slice.name for m in self.program.sharded_members}
        for p in self.training.parameters:
            if p.gradient not in replaced:
                by_node.setdefault(p.gradient, []).append(p.name)
                continue
            # A sharded parameter's gradient is formed from what heads are given, and from the rows of tables.
            structure = (p.table.parts if p.table is not None else None) if p.name in sharded else p.parts
            for term in () if structure is None else structure.terms:
                by_term.setdefault(term.node, []).append((p.name, term))
        done = 0
        for position, node in nodes:
            while done < len(placed) and placed[done].position < position:
                self.write_call(placed[done].call)
                done += 1
            for name, term in by_term.get(node.name, ()):
                (self._rows if name in sharded else self._terms).setdefault(name, []).append(self._term(term))
            if node.name in replaced:
                continue
            self.copy(node)
            for name in by_node.get(node.name, ()):
                own = self.copies[node]
                # Of what is gathered, the rows that this rank keeps are added to, once they are summed.
                self.gradients[name] = own if name in self.program.gathered else self.gradient(name, own)
        for rest in placed[done:]:
            self.write_call(rest.call)

    def write_call(self, call: Call) -> None:
        """Writes a call behind what was written so far."""
        if call.deferred and call.op.changes_parameters:  # its wait writes it
            return
        before = len(self.graph.nodes)
        self.values[call.index] = self.run(call)
        for node in islice(reversed(self.graph.nodes), len(self.graph.nodes) - before):
            node.meta[CALL] = call, node is self.values[call.index]
        if call.deferred and call.is_pending:
            begun = self._deferred(call)
            kept = self.call_module(f"deferred_{call.owner_group.index}", begun, (self.values[call.index],))
            kept.meta[CALL] = call, False

    def run(self, call: Call) -> Any:
        """Writes the call itself; returns its value."""
        value = call.op.write(self, call)
        if call.group is not None and call.group.compares_own and call.op.takes_gradients:
            factor = 1 if isinstance(call.layout, Varying) else self.world_size  # then their mean is the gradient
            look = Look(fragments(call.group, self.parameters), factor)
            return self.call_module(f"look_{call.group.index}", look, (value,))
        return value

    def compute(self) -> list[tuple[int, torch.fx.Node]]:
        """The joint graph's nodes, less placeholders and output, with their positions."""
        return self.joint.placed()

    @cached_property
    def nodes(self) -> dict[str, torch.fx.Node]:
        """The joint graph's nodes by name."""
        return {n.name: n for n in self.joint.module.graph.nodes}

    @cached_property
    def position(self) -> dict[torch.fx.Node, int]:
        """Of each node that computes; the output lies behind all."""
        return {n: i for i, n in self.compute()}

    def copy(self, node: torch.fx.Node) -> None:
        instead = self._instead.get(node, {})
        self.copies[node] = self.graph.node_copy(node, lambda n: instead[n] if n in instead else self.copies[n])

    def module(self, name: str) -> torch.fx.GraphModule:
        """The graph as a module, with the constants and submodules that it refers to."""
        root: dict[str, Any] = dict(self.modules)
        for node in self.graph.find_nodes(op="get_attr"):
            if node.target not in root:
                root[str(node.target)] = getattr(self.joint.module, str(node.target))
        self.graph.lint()
        return self.target.compiled(torch.fx.GraphModule(root, self.graph, class_name=name))

    # What operations ask of the site where they run.

    def value_of(self, call: Call) -> Any:
        return self.values.get(call.index)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def call_method(self, name: str, args: tuple[Any, ...]) -> torch.fx.Node:
        return self.graph.call_method(name, args)

    def call_module(self, name: str, module: torch.nn.Module, args: tuple[Any, ...]) -> torch.fx.Node:
        self.modules[name] = module
        return self.graph.call_module(name, args)

    def module_of(self, name: str, make: Callable[[], torch.nn.Module]) -> torch.fx.Node:
        if name not in self.modules:
            self.modules[name] = make()
        return self.graph.get_attr(name)

    def notes(self, group: Group) -> dict[Any, Any]:
        return self._notes.setdefault(group.index, {})

    def channel(self, subgroups: Subgroups | None = None, communicator: int = 0) -> str | None:
        if self.target.group is None:
            return None
        return self.target.group.name if subgroups is None else self.target.group.channel(subgroups, communicator)

    def mesh(self) -> str:
        assert self.target.group is not None, "nothing is sent without a process group"
        return self.target.group.mesh(tuple(s.name for s in self.program.context.servers))

    def computed(self, node: str) -> torch.fx.Node:
        return self.copies[self.nodes[node]]

    def replace(self, node: str, value: Any) -> None:
        self.copies[self.nodes[node]] = value

    def instead(self, node: str, input_node: str) -> torch.fx.Node:
        source = self.nodes[input_node]
        return self._instead.get(self.nodes[node], {}).get(source, self.copies[source])

    def look_up(self, node: str, rows: Any, places: Any) -> None:
        lookup = self.nodes[node]
        self._instead[lookup] = {lookup.args[0]: rows, lookup.args[1]: places}  # type: ignore[dict-item]

    def replace_parameter(self, names: Sequence[str], value: Any, views: bool) -> None:
        for node in self._placeholders(names):
            self.copies[node] = value
            if views:  # that the forward pass has made of what it was given, and that the backward pass reads, too
                found = {v for v in readers(node) if v in self.copies and is_view(v) and base(v) is node}
                for view in sorted(found, key=self.position.__getitem__):
                    self.copy(view)

    def rows(self, node: str, dimension: int = 0) -> int | torch.fx.Node:
        size = size_of(self.joint, self.nodes[node], dimension)
        return self.copies[size] if isinstance(size, torch.fx.Node) else size

    def strides(self, name: str) -> tuple[int, ...]:
        return self._placeholders((name,))[0].meta["val"].stride()  # type: ignore[no-any-return]

    def local_gradient(self, name: str) -> torch.fx.Node:
        return self.gradients[name]

    def gradient(self, name: str, value: torch.fx.Node) -> torch.fx.Node:
        return value

    def owns(self, name: str) -> bool:
        node = self.gradient_source(name)
        if self.training.eager:
            return False  # autograd may have left it in memory that another gradient lies in, too
        if sum(n is node for n in self.joint.module.graph.output_node().args[0]) > 1:  # type: ignore[union-attr]
            return False  # it is another parameter's gradient, too, as those of terms of one sum are, or an input's
        if repeats_memory(node.meta.get("val")):
            return False  # slices of it lie in one memory, and the sum of one would be added to the next
        while node.op == "call_function" and len(node.users) == 1:
            first = node.args[0] if node.args else None
            if node.target is operator.getitem and isinstance(first, torch.fx.Node) and not is_view(first):
                return True  # an element of an operator's results: memory of its own
            if not is_view(node):
                return True
            assert isinstance(first, torch.fx.Node)
            node = first
        return False

    def terms_of(self, name: str) -> list[tuple[Any, Any]]:
        return list(self._terms[name])

    def rows_of(self, name: str) -> Sequence[tuple[Any, Any]]:
        return self._rows.get(name, ())

    def sum_parts(self, wait: Call, parts: Any, dtype: torch.dtype) -> torch.fx.Node:
        return self.call(collectives.sum_parts, (parts, dtype))

    def part(self, group: int, pieces: tuple[Fragment, ...]) -> OptimizerPart:
        assert self.target.part is not None, "only a program with an optimizer updates parameters"
        return self.target.part(group, pieces)

    def stored(self, group: Group, sender: int | None) -> Received | None:
        return None if sender == self.rank else Received(fragments(group, self.parameters))

    def state(self, call: Call, key: str) -> torch.fx.Node | None:
        assert self.target.state is not None, "only a program with an optimizer has state"
        tensor = self.target.state(call, key)  # of no elements, too: all ranks save it together
        if not call.held_elements(self.rank) and call.elements:
            return None
        return self.call_module(f"state_{key}_{call.owner_group.index}", Held(tensor), ())

    def deferred_of(self, call: Call) -> torch.fx.Node:
        return self.call_module(f"deferred_{call.owner_group.index}", self._deferred(call), ())

    def gradient_source(self, name: str) -> torch.fx.Node:
        """The node of the joint graph whose value is a parameter's gradient."""
        parameter = self.training.by_name[name]
        return next(self.joint.gradients[n] for n in (name, *parameter.spec.ties) if n in self.joint.gradients)

    def _deferred(self, call: Call) -> Deferred:
        assert self.target.deferred is not None, "only a program with an optimizer has parameters on their way"
        begun = call if call.is_pending else call.inputs[0]
        return self.target.deferred(call.owner_group.index, self.stored(call.owner_group, begun.op.sender(begun)))

    def _placeholders(self, names: Sequence[str]) -> list[torch.fx.Node]:
        """The joint graph's inputs that are these parameters."""
        inputs = self.joint.module.graph.find_nodes(op="placeholder")
        wanted = {("parameter", name) for name in names}
        return [node for node, key in zip(inputs, self.joint.inputs, strict=True) if key in wanted]

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
