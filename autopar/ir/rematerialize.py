"""Rematerialization of products: a product that the backward pass reads is formed again there, not kept.

Only where both factors are kept for the backward pass anyway, as with dropout behind a softmax: then keeping the
product costs memory at the fullest moment, and forming it again is one cheap elementwise operator.
"""

from __future__ import annotations

import torch
import torch.fx

from autopar.ir.aliases import is_view, readers

aten = torch.ops.aten


def rematerialize_products(graph: torch.fx.Graph) -> None:
    """Forms such products anew before their first use in the backward pass; no value changes."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    late = backward_nodes(graph)
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        factors = [a for a in product.args if isinstance(a, torch.fx.Node)]
        if product in late or len(factors) != 2 or product.kwargs:
            continue
        uses = [(v, u) for v in _views(product, late) for u in v.users if u in late]
        if not uses or any(u.op == "output" for _, u in uses):
            continue
        first = min((u for _, u in uses), key=lambda u: order[u])
        if all(any(order.get(r, 0) >= order[first] and r in late for r in readers(f)) for f in factors):
            _form_again(graph, product, uses, first)
    graph.lint()


def backward_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes that depend on a tangent; views that only such nodes read; and what is computed behind the first of them
    for them alone, as the 3 x^2 behind a cube is."""
    late = {n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")}
    behind = set[torch.fx.Node]()
    begun = False
    for node in graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            begun = True
        elif begun and node.op == "call_function":
            behind.add(node)
    for node in reversed(graph.nodes):
        if (is_view(node) or node in behind) and node.users and all(u in late for u in node.users):
            late.add(node)
    return late


def _views(node: torch.fx.Node, late: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """The node, and its views in the forward pass."""
    found = [node]
    for v in found:
        found.extend(u for u in v.users if is_view(u) and u not in late)
    return found


def _form_again(
    graph: torch.fx.Graph, product: torch.fx.Node, uses: list[tuple[torch.fx.Node, torch.fx.Node]], first: torch.fx.Node
) -> None:
    again: dict[torch.fx.Node, torch.fx.Node] = {}

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in again:
            source = node.args[0]
            if node is not product:
                assert isinstance(source, torch.fx.Node)
                copied(source)
            with graph.inserting_before(first):
                again[node] = graph.node_copy(node, lambda n: again.get(n, n))
        return again[node]

    for view, user in uses:
        user.replace_input_with(view, copied(view))
