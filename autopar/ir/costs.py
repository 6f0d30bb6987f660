"""What each node of a graph costs: operations, bytes moved, and bytes alive while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from autopar.ir.aliases import base, is_view
from autopar.ir.training_graph import ComputeNode


def compute_nodes(graph: torch.fx.Graph, freed_at_once: Iterable[torch.fx.Node] = ()) -> tuple[ComputeNode, ...]:
    """The graph's nodes in order. Values of `freed_at_once` (gradients, which the step consumes as they complete)
    count as alive only while they are computed and read."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    needed = _needed_until(graph, nodes, {owner_of(n) for n in freed_at_once})
    own = {n: tensor_bytes(n.meta.get("val")) for n in needed}
    change = [0] * (len(nodes) + 2)
    for i, node in enumerate(nodes):
        if node in needed:
            change[i] += own[node]
            change[needed[node] + 1] -= own[node]
    live = accumulate(change[: len(nodes)])
    return tuple(
        ComputeNode(
            n.name,
            _op_name(n),
            _flops(n),
            0 if is_view(n) else _bytes_moved(n),
            alive,
            own.get(n, 0),
            needed.get(n, i),
        )
        for i, (n, alive) in enumerate(zip(nodes, live, strict=True))
    )


def _op_name(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removeprefix("aten.")
    return str(getattr(target, "__name__", target))


def _flops(node: torch.fx.Node) -> int:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._overloadpacket not in flop_registry:
        return 0
    args, kwargs = pytree.tree_map(_value, (node.args, node.kwargs))
    return int(flop_registry[target._overloadpacket](*args, **kwargs, out_val=node.meta.get("val")))


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, torch.fx.Node) else x


def tensor_bytes(value: Any) -> int:
    """Bytes of a (fake) tensor, or of all tensors in a nest of them."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def _bytes_moved(node: torch.fx.Node) -> int:
    if getattr(node.target, "__name__", "") == "getitem":
        return 0
    read = sum(tensor_bytes(n.meta.get("val")) for n in node.all_input_nodes)
    return read + tensor_bytes(node.meta.get("val"))


def _needed_until(
    graph: torch.fx.Graph, nodes: list[torch.fx.Node], freed: set[torch.fx.Node]
) -> dict[torch.fx.Node, int]:
    """Of each node that allocates memory, the position of the last one that needs it; behind the last of all where it
    is a result."""
    position = {n: i for i, n in enumerate(nodes)}
    last: dict[torch.fx.Node, int] = {}
    for node, i in position.items():
        for source in (node, *node.all_input_nodes):
            last[owner_of(source)] = i
    for result in graph.output_node().all_input_nodes:
        owner = owner_of(result)
        if owner not in freed:
            last[owner] = len(nodes)
    return {owner: end for owner, end in last.items() if owner in position}


def owner_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node that allocated this node's memory; for an element of a tuple, the operator that made the tuple."""
    while True:
        node = base(node)
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        from_tuple = getattr(node.target, "__name__", "") == "getitem"
        if not (writes or from_tuple) or not isinstance(node.args[0], torch.fx.Node):
            return node
        node = node.args[0]
