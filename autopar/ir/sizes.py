"""Sizes that follow a batch's shapes: what a graph that serves batches of many sizes knows of them.

TorchDynamo and AOTAutograd trace with a symbol for each dimension that varies, and record what they have assumed of the
symbols. Here each number that follows from them becomes an input of the graph, of kind `size`, which is computed from
the batch's shapes before the graph runs. All else of the graph is as if it had been traced for one batch: passes and
plans see tensors of fixed sizes, at which nothing is equal by chance (primes, where they fit). What they conclude from
sizes that are equal therefore holds for all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.ir.joint import JointGraph
from autopar.ir.served import Shapes, Sizes, Varying
from autopar.ir.symbols import (
    Described,
    Dimensions,
    NoHintsError,
    StaticOnlyError,
    Symbols,
    generic_sizes,
    number_of,
    raw_size,
    ties_of,
)

_SYMBOLIC = "symbolic"
"""Under this, nodes keep their values with symbols until the graph is built."""
_SHAPE = "sizes"
"""Under this, nodes keep the sizes of their dimensions, where those follow the batch's."""


def with_sizes(joint: JointGraph, shape_env: Any, varying: Varying) -> JointGraph:
    """A graph that was traced with symbols, with inputs of kind `size` in the place of what it computes from them.

    Raises `StaticOnlyError` where the trace has fixed all sizes that vary, or holds numbers that follow from values.
    """
    if shape_env.deferred_runtime_asserts:
        raise StaticOnlyError("what was traced follows from values, not from sizes alone")
    batch = {
        int(k): n
        for n, (kind, k) in zip(_placeholders(joint.module.graph), joint.inputs, strict=True)
        if kind == "batch"
    }
    dimensions = tuple(
        ((i, d), raw_size(s)) for i, n in sorted(batch.items()) for d, s in enumerate(n.meta["val"].shape)
    )
    try:
        sizes, numbers = _read(joint.module.graph, Symbols(shape_env, {}), dimensions, varying)
    except NoHintsError:  # sizes whose products are equal, say
        ties = ties_of(shape_env, dimensions)
        sizes, numbers = _read(joint.module.graph, Symbols(shape_env, ties), dimensions, varying)
    joint = replace(joint, inputs=_with_inputs(joint, numbers, sizes.expressions), sizes=sizes)
    take_hint(joint, 0)
    for node in joint.module.graph.nodes:
        described = node.meta.get(_SYMBOLIC)
        if isinstance(described, Described):
            node.meta[_SHAPE] = described.shape
    return joint


def _read(
    graph: torch.fx.Graph, symbols: Symbols, dimensions: Dimensions, varying: Varying
) -> tuple[Sizes, list[torch.fx.Node]]:
    """What a graph has assumed of its symbols, and its nodes that compute numbers. Leaves with each node what its value
    is in symbols."""
    known = {s for _, s in dimensions if isinstance(s, sympy.Symbol)}
    if not any(symbols.settled(s).free_symbols for place, s in dimensions if place in varying):
        raise StaticOnlyError("tracing has fixed the sizes that vary")
    guards = (*symbols.guards, *(r for s in known for r in symbols.range_of(s)))
    numbers = [n for n in graph.nodes if isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))]
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta[_SYMBOLIC] = pytree.tree_map_only(torch.Tensor, symbols.described, node.meta["val"])
    for node in numbers:
        node.meta[_SYMBOLIC] = symbols.of(node.meta["val"])
    tensors = [t for n in graph.nodes for t in _described(n)]
    every_size = dict.fromkeys(s for t in tensors for s in t.shape)
    found = dict.fromkeys(
        [*(n.meta[_SYMBOLIC] for n in numbers), *(s for t in tensors if len(t.shape) == 2 for s in t.shape)]
    )
    if any(not e.free_symbols <= known for e in (*guards, *found, *every_size)):
        raise StaticOnlyError("what was traced follows from values, not from sizes alone")
    hints = generic_sizes(symbols, known, guards, list(every_size))
    return Sizes(dimensions, guards, hints, [e for e in found if e.free_symbols]), numbers


def take_hint(joint: JointGraph, which: int) -> None:
    """Gives all nodes the sizes of one of the hints."""
    assert joint.sizes is not None
    hint, mode = joint.sizes.hints[which], FakeTensorMode()
    made: dict[Described, torch.Tensor] = {}

    def tensor(described: Described) -> torch.Tensor:
        if described not in made:
            shape, strides = (
                [int(number_of(e.xreplace(hint))) for e in x] for x in (described.shape, described.strides)
            )
            with mode:
                made[described] = torch.empty_strided(shape, strides, dtype=described.dtype, device=described.device)
        return made[described]

    for node in joint.module.graph.nodes:
        if _SYMBOLIC in node.meta:
            value = node.meta[_SYMBOLIC]
            is_number = isinstance(value, sympy.Basic)
            node.meta["val"] = (
                number_of(value.xreplace(hint)) if is_number else pytree.tree_map_only(Described, tensor, value)
            )


def forget_symbols(graph: torch.fx.Graph) -> None:
    """Lets go of the values with symbols, once the graph is built."""
    for node in graph.nodes:
        node.meta.pop(_SYMBOLIC, None)


def size_inputs(joint: JointGraph) -> dict[torch.fx.Node, int]:
    """The graph's inputs of kind `size`, each with its index."""
    inputs = zip(_placeholders(joint.module.graph), joint.inputs, strict=True)
    return {n: int(key) for n, (kind, key) in inputs if kind == "size"}


def size_of(joint: JointGraph, node: torch.fx.Node, dimension: int) -> int | torch.fx.Node:
    """A node's size: a number, or the input that it is."""
    size = node.meta[_SHAPE][dimension] if _SHAPE in node.meta else sympy.Integer(node.meta["val"].shape[dimension])
    if not size.free_symbols:
        return int(size)
    assert joint.sizes is not None
    index = joint.sizes.expressions.index(size)
    return next(n for n, i in size_inputs(joint).items() if i == index)


def shape_for(joint: JointGraph, node: torch.fx.Node, shapes: Shapes) -> tuple[int, ...]:
    """The shape that a node's value has for a batch of these shapes."""
    if joint.sizes is None or _SHAPE not in node.meta:
        return tuple(node.meta["val"].shape)
    return tuple(int(joint.sizes.evaluate(s, shapes)) for s in node.meta[_SHAPE])


def following(joint: JointGraph, numbers: tuple[float, float]) -> sympy.Expr | None:
    """What has these two values at the two hints: a size, or a number of elements over some of a value's dimensions."""
    assert joint.sizes is not None
    for expression in dict.fromkeys(_counts(joint)):
        values = tuple(float(number_of(expression.xreplace(hint))) for hint in joint.sizes.hints)
        if values == numbers:
            return expression
    return None


def _with_inputs(
    joint: JointGraph, numbers: Sequence[torch.fx.Node], expressions: Sequence[sympy.Expr]
) -> tuple[tuple[str, str | int], ...]:
    """Puts inputs in front of the tangents, and in the place of nodes that compute numbers; returns all inputs."""
    graph = joint.module.graph
    first = next(i for i, (kind, _) in enumerate((*joint.inputs, ("tangent", 0))) if kind == "tangent")
    before = next(n for n in graph.nodes if n.op != "placeholder") if first == len(joint.inputs) else None
    own: dict[sympy.Expr, torch.fx.Node] = {}
    with graph.inserting_before(before or _placeholders(graph)[first]):
        for i, expression in enumerate(expressions):
            own[expression] = graph.placeholder(f"size_{i}")
            own[expression].meta[_SYMBOLIC] = expression
    for node in numbers:
        expression = node.meta[_SYMBOLIC]
        if expression.free_symbols:
            node.replace_all_uses_with(own[expression])
        else:
            _write_out(node, number_of(expression))
    for node in reversed(numbers):
        graph.erase_node(node)
    graph.lint()
    return (*joint.inputs[:first], *(("size", i) for i in range(len(expressions))), *joint.inputs[first:])


def _write_out(node: torch.fx.Node, number: int | float | bool) -> None:
    for user in list(node.users):
        user.args, user.kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda n: number if n is node else n)


def _counts(joint: JointGraph) -> Iterator[sympy.Expr]:
    assert joint.sizes is not None
    yield from joint.sizes.expressions
    shapes = dict.fromkeys(t.shape for n in joint.module.graph.nodes for t in _described(n))
    for shape in shapes:
        for count in range(1, min(len(shape), 6) + 1):
            yield from (math.prod(some) for some in itertools.combinations(shape, count))


def _described(node: torch.fx.Node) -> list[Described]:
    return [t for t in pytree.tree_leaves(node.meta.get(_SYMBOLIC)) if isinstance(t, Described)]


def _placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return list(graph.find_nodes(op="placeholder"))
