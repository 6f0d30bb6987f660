"""Operators without a result, as linear algebra's check for singular matrices: kept in their place in a graph.

AOTAutograd threads tokens through the graph, from one such operator to the next, so that none is reordered or
removed. A graph that runs node by node, in order, needs no tokens.
"""

from __future__ import annotations

import operator

import torch
import torch.fx


def remove_tokens(module: torch.fx.GraphModule) -> None:
    """Writes operators with effects as plain calls, and takes the tokens out of the graph's inputs and outputs."""
    from torch._functorch._aot_autograd import descriptors as d
    from torch._higher_order_ops.effects import with_effects

    tokens = (d.ForwardTokenAOTInput, d.BackwardTokenAOTInput, d.ForwardTokenAOTOutput, d.BackwardTokenAOTOutput)
    graph = module.graph
    output = graph.output_node()
    results: list[tuple[torch.fx.Node | None, object]]
    results = list(zip(output.args[0], output.meta["desc"], strict=True))  # type: ignore[arg-type]
    results = [(node, desc) for node, desc in results if not isinstance(desc, tokens)]
    output.args = ([node for node, _ in results],)
    output.meta["desc"] = [desc for _, desc in results]
    for node in reversed(graph.find_nodes(op="call_function", target=with_effects)):
        _plain(graph, node)
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], tokens):
            graph.erase_node(node)


def _plain(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Calls the operator itself: its results are those of `with_effects`, less the token in front."""
    _, target, *args = node.args
    with graph.inserting_before(node):
        plain = graph.call_function(target, tuple(args), node.kwargs)  # type: ignore[arg-type]
    values = node.meta["val"][1:]
    plain.meta = {**node.meta, "val": values[0] if len(values) == 1 else values}
    for user in list(node.users):
        assert user.target is operator.getitem, "the results of an operator with effects are a tuple"
        place = user.args[1]
        assert isinstance(place, int)
        if place > 0 and len(values) > 1:
            user.args = (plain, place - 1)
            continue
        if place > 0:
            user.replace_all_uses_with(plain)
        graph.erase_node(user)
    graph.erase_node(node)
