"""The model's output, where a step returns it: in memory of its own, and computed without disturbing the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from autopar.ir.aliases import base


def own_outputs(graph: torch.fx.Graph, outputs: Sequence[torch.fx.Node], first: int) -> list[torch.fx.Node]:
    """The nodes whose values are handed out for `outputs`, which are the graph's results from the one numbered `first`
    on.

    Where an output lies in the memory of a parameter, a buffer or the batch, that is a copy, made while the value is
    what the model has returned. What is computed for outputs alone runs behind everything else: so the step has the
    order, and the collectives, that it has without them.
    """
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    found = list(outputs)
    for i, node in enumerate(outputs):
        if base(node).op != "call_function":
            with graph.inserting_after(node):
                found[i] = graph.call_function(torch.ops.aten.clone.default, (node,))
            found[i].meta.update(val=node.meta["val"])
    results[first : first + len(found)] = found
    graph.output_node().args = (tuple(results),)
    _move_behind(graph, [r for i, r in enumerate(results) if r is not None and not first <= i < first + len(found)])
    return found


def _move_behind(graph: torch.fx.Graph, others: Sequence[torch.fx.Node]) -> None:
    """Moves what none of the `others` needs to the end, but for random operators, which draw in the model's order, and
    what lies in the memory that the graph is given, which the step may write to."""
    needed, frontier = set(others), list(others)
    while frontier:
        more = [n for n in frontier.pop().all_input_nodes if n not in needed]
        needed.update(more)
        frontier += more
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in needed and not _stays(node):
            graph.output_node().prepend(node)
        else:
            needed.add(node)


def _stays(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return True
    return any(base(n).op != "call_function" for n in node.all_input_nodes)
