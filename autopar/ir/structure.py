"""Finds what gradients are made of: rows of an embedding table, or products of two thin matrices.

Read off the joint graph. The gradient of a table that is looked up holds nothing but the rows that were looked up; the
gradient of a linear layer is the product of the output's gradient and the input, and has the rank of the batch. Both
can be sent as what they are made of: merged sparse rows (Parallax, EuroSys 2019), and sufficient factors (Xie et al.,
UAI 2016; Poseidon, ATC 2017).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.fx

from autopar.ir.simplify import dropout_noise
from autopar.ir.training_graph import Parts, Term
from autopar.ir.weightless import lacks_values

aten = torch.ops.aten

_MOST_INDEX_NODES = 64
"""Nodes that are run to look at the indices of the example batch."""

_ADD = (aten.add.Tensor, aten.add_.Tensor)


class _Dense(Exception):
    """The gradient has no structure that is known here."""


def find_parts(
    gradient: torch.fx.Node,
    shape: Sequence[int],
    position: Mapping[torch.fx.Node, int],
    batch: Mapping[torch.fx.Node, Any],
    without: torch.fx.Node | None = None,
) -> Parts | None:
    """What a parameter's gradient is made of; `None` where it is dense. `batch`: the example's tensors, by their
    placeholders. `without`: a summand that is left aside, whatever it is made of."""
    results: Any = gradient.graph.output_node().args[0]
    if len(shape) != 2 or sum(n is gradient for n in results) != 1:
        return None
    finder = _Finder(position, without)
    try:
        finder.visit(gradient, transposed=False, users={gradient.graph.output_node()})
    except _Dense:
        return None
    if len(finder.kinds) != 1:
        return None
    kind = finder.kinds.pop()
    nodes = finder.nodes
    replaced = tuple(n.name for n in finder.replaced)
    terms = tuple(sorted(finder.terms, key=lambda t: t.position))
    if kind == "factors":
        rows = sum(_shape(nodes[t.right])[1 if t.right_transposed else 0] for t in terms)
        return Parts(kind, terms, rows, rows, shape[0], shape[1], -1, replaced)
    indices = [nodes[t.left] for t in terms]
    rows, distinct = looked_up(indices, shape[0], batch)
    known = max(position.get(n, -1) for n in indices)
    return Parts(kind, terms, rows, distinct, 0, shape[1], known, replaced)


def looked_up(indices: Sequence[torch.fx.Node], height: int, batch: Mapping[torch.fx.Node, Any]) -> tuple[int, int]:
    """How many rows of a table so high these indices are, and how many different ones in the example batch."""
    rows = sum(_elements(n) for n in indices)
    distinct = _distinct(indices, batch)
    return rows, min(height, rows) if distinct is None else distinct


class _Finder:
    """Walks from a gradient down to the terms that it is the sum of."""

    def __init__(self, position: Mapping[torch.fx.Node, int], without: torch.fx.Node | None) -> None:
        self.position = position
        self.without = without
        self.terms: list[Term] = []
        self.kinds: set[Literal["rows", "factors"]] = set()
        self.replaced: list[torch.fx.Node] = []
        self.nodes: dict[str, torch.fx.Node] = {}
        """What the terms are made of, by name."""

    def visit(self, node: torch.fx.Node, transposed: bool, users: set[torch.fx.Node]) -> None:
        """`users`: the nodes that read this one's value; where there are others, it must be computed anyway."""
        if node.op != "call_function" or not set(node.users) <= users:
            raise _Dense
        if node is self.without:
            return
        self.replaced.append(node)
        target = node.target
        if target in _ADD and not node.kwargs and all(isinstance(a, torch.fx.Node) for a in node.args):
            for a in node.args:
                self.visit(a, transposed, {node})  # type: ignore[arg-type]
        elif _transposes(node):
            self.visit(node.args[0], not transposed, {node})  # type: ignore[arg-type]
        elif target is aten.mm.default:
            self._factors(node, transposed)
        elif target is aten.embedding_dense_backward.default and not transposed:
            self._rows(node)
        elif target is aten._embedding_bag_backward.default and not transposed:
            self._bags(node)
        else:
            raise _Dense

    def _factors(self, node: torch.fx.Node, transposed: bool) -> None:
        """`P Q` as (left)^T (right), each of one row a sample."""
        p, q = node.args
        assert isinstance(p, torch.fx.Node) and isinstance(q, torch.fx.Node)
        (left, left_t), (right, right_t) = ((q, False), (p, True)) if transposed else ((p, True), (q, False))
        self._add("factors", node, left, right, left_transposed=left_t, right_transposed=right_t)

    def _rows(self, node: torch.fx.Node) -> None:
        values, indices, _, padding, by_frequency = node.args
        if by_frequency:
            raise _Dense
        self._add("rows", node, indices, values, padding=_padding(padding))

    def _bags(self, node: torch.fx.Node) -> None:
        values, indices, offsets = node.args[:3]
        by_frequency, mode = node.args[7], node.args[8]
        weights = node.args[10] if len(node.args) > 10 else None
        padding = node.args[11] if len(node.args) > 11 else -1
        if by_frequency or mode not in (0, 1) or weights is not None or (mode == 1 and _padding(padding) >= 0):
            raise _Dense
        assert isinstance(offsets, torch.fx.Node)
        self._add("rows", node, indices, values, padding=_padding(padding), offsets=offsets.name, mean=mode == 1)

    def _add(self, kind: Literal["rows", "factors"], node: torch.fx.Node, left: Any, right: Any, **more: Any) -> None:
        if not isinstance(left, torch.fx.Node) or not isinstance(right, torch.fx.Node):
            raise _Dense
        self.kinds.add(kind)
        self.nodes |= {left.name: left, right.name: right}
        self.terms.append(Term(node.name, self.position[node], left.name, right.name, **more))


def _transposes(node: torch.fx.Node) -> bool:
    """Whether a matrix is turned over."""
    if node.target is aten.t.default:
        return True
    dims: Any = node.args[1:] if node.target is aten.transpose.int else None
    if node.target is aten.permute.default:
        dims = node.args[1]
        return [d % 2 for d in dims] == [1, 0]
    return dims is not None and sorted(d % 2 for d in dims) == [0, 1]


def _padding(index: Any) -> int:
    return int(index) if isinstance(index, int) else -1


def _shape(node: torch.fx.Node) -> tuple[int, ...]:
    return tuple(int(x) for x in node.meta["val"].shape)


def _elements(node: torch.fx.Node) -> int:
    return int(node.meta["val"].numel())


def _distinct(indices: Sequence[torch.fx.Node], batch: Mapping[torch.fx.Node, Any]) -> int | None:
    """How many different indices the example batch has; `None` where they are not soon computed from it."""
    needed = ancestors(indices)
    given = [n for n in needed if n.op == "placeholder"]
    if len(needed) > _MOST_INDEX_NODES or any(_lacks_values(batch.get(n)) for n in given):
        return None
    values: dict[torch.fx.Node, Any] = {}
    for node in indices[0].graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            values[node] = batch[node]
        elif node.op == "call_function" and not is_random(node):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        else:
            return None
    looked_up: torch.Tensor = torch.cat([values[n].reshape(-1) for n in indices])
    return len(set(looked_up.tolist()))


def _lacks_values(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and lacks_values(value))


def ancestors(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes that these are computed from, themselves included."""
    found: set[torch.fx.Node] = set()
    frontier = list(nodes)
    while frontier:
        node = frontier.pop()
        if node not in found:
            found.add(node)
            frontier.extend(node.all_input_nodes)
    return found


def is_random(node: torch.fx.Node) -> bool:
    """Whether it draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return node.target is dropout_noise or torch.Tag.nondeterministic_seeded in tags
