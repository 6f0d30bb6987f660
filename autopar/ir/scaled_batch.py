"""A training graph for a batch of another size: scaled, not captured again.

What depends on the batch grows with its samples: operations, bytes moved, activations, rows of tables that are looked
up, samples of heads and layers. What does not, stays: weights, gradients of parameters, and what is made of weights
alone. Different rows of a table are taken to grow as the rows do, at most to the table's size. Where a model compares
samples with each other its work grows faster, so such a model is not scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import torch.fx

from autopar.ir.costs import owner_of, tensor_bytes
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.joint import JointGraph
from autopar.ir.training_graph import ComputeNode, Parameter, Parts, Table, TrainingGraph

ASSUMPTION = "scaled with the batch, not captured again: operations, activations and rows grow with its samples"


def why_not(graph: TrainingGraph, factor: Fraction) -> str | None:
    """Why a graph cannot be scaled to a batch of `factor` times the size; `None` where it can."""
    if graph.eager:
        return "the model runs eagerly, and its time was measured for one batch size"
    if graph.batch_size is None:
        return "the batch has no number of samples"
    samples = factor * graph.batch_size
    if samples.denominator != 1:
        return f"a batch of {graph.batch_size} on each rank cannot be multiplied by {factor}"
    joint = graph.joint
    if joint is not None and joint.gathers:
        return "the model compares samples of all ranks with each other"
    if joint is not None and joint.weight is not None and joint.weight.problem is not None:
        return f"samples may be compared with each other: the loss {joint.weight.problem}"
    if joint is not None and (node := _comparison(graph, joint, graph.batch_size)):
        return f"samples are compared with each other: '{node}' takes values of two of them"
    return None


def scaled(graph: TrainingGraph, factor: Fraction) -> TrainingGraph:
    """The graph for a batch of `factor` times the size; `why_not` must have allowed it."""
    assert graph.batch_size is not None, "a batch that can be scaled has a size"
    found = _Fixed.of(graph)

    def grown(value: int, fixed: int = 0) -> int:
        kept = min(value, fixed)
        return kept + round(factor * (value - kept))

    alive = _alive(graph.compute, found.own)
    compute = tuple(
        replace(
            node,
            flops=node.flops if node.name in found.nodes else grown(node.flops),
            bytes_moved=grown(node.bytes_moved, found.moved.get(node.name, 0)),
            live_bytes=grown(node.live_bytes, held),
            own_bytes=grown(node.own_bytes, found.own.get(node.name, 0)),
        )
        for node, held in zip(graph.compute, alive, strict=True)
    )
    return replace(
        graph,
        compute=compute,
        parameters=tuple(_parameter(p, grown, found.nodes) for p in graph.parameters),
        batch_size=int(factor * graph.batch_size),
        input_bytes=grown(graph.input_bytes),
    )


@dataclass(frozen=True)
class _Fixed:
    """What does not depend on the batch."""

    nodes: frozenset[str]
    """Whose values follow from parameters and buffers alone."""
    own: dict[str, int]
    """Bytes, of what a node allocates."""
    moved: dict[str, int]
    """Bytes, of what a node reads and writes."""

    @classmethod
    def of(cls, graph: TrainingGraph) -> _Fixed:
        size = {p.gradient: p.numel * DTYPE_BYTES[p.spec.dtype] for p in graph.parameters}
        for p in graph.parameters:
            # The summands of a gradient are as large as it is.
            size |= {term.node: size[p.gradient] for term in (p.parts.terms if p.parts is not None else ())}
        if graph.joint is None:
            return cls(frozenset(), size, dict(size))
        return _of_joint(graph.joint, size)


def _varying(joint: JointGraph) -> set[torch.fx.Node]:
    """Nodes whose values depend on the batch."""
    kinds = iter(joint.inputs)
    varies: set[torch.fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            is_input = next(kinds)[0] in ("batch", "tangent")
        else:
            is_input = any(n in varies for n in node.all_input_nodes)
        if is_input:
            varies.add(node)
    return varies


def _comparison(graph: TrainingGraph, joint: JointGraph, batch_size: int) -> str:
    """The first node of the forward pass whose value has an element for each pair of samples, by its operator: products
    of two matrices of the batch, and what is broadcast along two samples. Empty where none is seen."""
    varies = _varying(joint)
    forward = {node.name for node in graph.compute[: graph.backward_start]}
    for node in joint.module.graph.nodes:
        given = [x for x in node.args if isinstance(x, torch.fx.Node) and x in varies]
        if node.name not in forward or len(given) < 2:
            continue
        shapes = [tuple(n.meta["val"].shape) for n in given if isinstance(n.meta.get("val"), torch.Tensor)]
        name = _op(node)
        if name in ("mm", "addmm"):
            compares = all(len(shape) == 2 for shape in shapes[-2:])
        elif name in ("bmm", "baddbmm"):
            compares = shapes[-1][0] % batch_size > 0
        elif name in ("_cdist_forward", "_euclidean_dist"):
            compares = len(shapes[-1]) == 2 or shapes[-1][0] % batch_size > 0
        else:
            compares = _crossed(shapes, batch_size)
        if compares:
            return name
    return ""


def _op(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]


def _crossed(shapes: list[tuple[int, ...]], batch_size: int) -> bool:
    """Whether samples lie along one dimension of a value, and along another, in which the first has one element, of
    a second value."""
    heads = {shape[:2] for shape in shapes}
    return batch_size > 1 and {(batch_size, 1), (1, batch_size)} <= heads


def _of_joint(joint: JointGraph, gradients: dict[str, int]) -> _Fixed:
    """`gradients`: bytes of those of parameters, by the nodes whose values they are."""
    nodes = list(joint.module.graph.nodes)
    varies = _varying(joint)
    own: dict[str, int] = {}
    for node in nodes:
        if node.name in gradients:
            owner = owner_of(node)
            own[owner.name] = own.get(owner.name, 0) + gradients[node.name]
    moved = dict(own)
    for node in nodes:
        if node not in varies:
            own[node.name] = tensor_bytes(node.meta.get("val"))
        fixed = [n for n in (node, *node.all_input_nodes) if n not in varies]
        moved[node.name] = moved.get(node.name, 0) + sum(tensor_bytes(n.meta.get("val")) for n in fixed)
    return _Fixed(frozenset(n.name for n in nodes if n not in varies), own, moved)


def _alive(compute: tuple[ComputeNode, ...], own: dict[str, int]) -> list[int]:
    """Bytes of what is alive while each node runs, of what does not depend on the batch."""
    change = [0] * (len(compute) + 2)
    for i, node in enumerate(compute):
        held = min(node.own_bytes, own.get(node.name, 0))
        change[i] += held
        change[max(node.needed_until, i) + 1] -= held
    return list(accumulate(change[: len(compute)]))


def _parameter(parameter: Parameter, grown: Callable[[int], int], fixed: frozenset[str]) -> Parameter:
    table, head, layer = parameter.table, parameter.head, parameter.layer
    most = parameter.spec.shape[0] if parameter.spec.shape else 1

    def parts_of(parts: Parts) -> Parts:
        if all(term.left in fixed for term in parts.terms):  # rows that are the same for each sample, as of positions
            return parts
        rows, distinct = grown(parts.rows), grown(parts.distinct)
        return replace(parts, rows=rows, distinct=rows if parts.kind == "factors" else min(distinct, most))

    def table_of(table: Table) -> Table:
        lookups = (
            k if k.indices in fixed else replace(k, rows=grown(k.rows), distinct=min(grown(k.distinct), most))
            for k in table.lookups
        )
        return replace(table, lookups=tuple(lookups), parts=parts_of(table.parts))

    return replace(
        parameter,
        parts=parameter.parts and parts_of(parameter.parts),
        table=table and table_of(table),
        head=head and replace(head, samples=grown(head.samples)),
        layer=layer and replace(layer, samples=grown(layer.samples)),
    )
