"""Recomputation of activations: what the forward pass keeps for the backward pass is computed again there instead.

`selective` keeps products and other operators that take long, and of the rest the fewest bytes from which all else
follows: a minimum cut, as PyTorch's partitioner makes it ("min-cut rematerialization", Horace He, 2022; the name is
Korthikanti et al.'s, 2022). `full` keeps what crosses a few places of the forward pass, and computes all between two of
them again (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). No value changes, and random numbers
are never drawn again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import networkx as nx
import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

from autopar.ir.aliases import base, is_view
from autopar.ir.rematerialize import backward_nodes
from autopar.ir.structure import is_random
from autopar.spec.plan import Recompute

aten = torch.ops.aten

_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Into so many parts the forward pass may be cut."""
_NEVER = (aten._log_softmax, aten._softmax_backward_data)
"""The end of the forward pass: the backward pass begins with it."""

Nodes = Collection[torch.fx.Node]


def recompute_activations(graph: torch.fx.Graph, how: Recompute) -> None:
    """Rewrites a joint graph that overwrites nothing yet."""
    if how == "none":
        return
    late = backward_nodes(graph)
    forward = [n for n in graph.nodes if n.op == "call_function" and n not in late]
    kept = _fewest_bytes(forward, late) if how == "selective" else _at_cuts(forward, late)
    _compute_again(graph, late, kept)
    graph.eliminate_dead_code()
    graph.lint()


def _compute_again(graph: torch.fx.Graph, late: Nodes, kept: Nodes) -> None:
    """Every node of the backward pass reads what is kept, or what is computed anew from it in front of its first
    reader."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    again: dict[torch.fx.Node, torch.fx.Node] = {}

    def is_gone(node: torch.fx.Node) -> bool:
        if node in late or node.op != "call_function" or node in kept or base(node) in kept or _stays(base(node)):
            return False
        # An element of results that are still there is there, too: taken out again, it would be the same memory twice.
        return node.target is not operator.getitem or is_gone(node.args[0])  # type: ignore[arg-type]

    for reader in [n for n in graph.nodes if n in late and n.op == "call_function"]:
        needed: set[torch.fx.Node] = set()
        frontier = list(reader.all_input_nodes)
        while frontier:
            node = frontier.pop()
            if is_gone(node) and node not in again and node not in needed:
                needed.add(node)
                frontier += node.all_input_nodes
        with graph.inserting_before(reader):
            for node in sorted(needed, key=order.__getitem__):
                again[node] = graph.node_copy(node, lambda n: again.get(n, n))
        for source in reader.all_input_nodes:
            if source in again:
                reader.replace_input_with(source, again[source])


def _fewest_bytes(forward: Sequence[torch.fx.Node], late: Nodes) -> set[torch.fx.Node]:
    """The cheapest set of values from which all that the backward pass reads follows without operators that stay."""
    flow = nx.DiGraph()
    for node in forward:
        fixed = _stays(node) or _is_expensive(node)
        flow.add_edge((node, "in"), (node, "out"), capacity=_bytes(node))
        if fixed:
            flow.add_edge("source", (node, "in"))
        for user in node.users:
            if user in late:
                flow.add_edge((node, "out"), "sink")
            elif user.op == "call_function":
                flow.add_edge((node, "out"), (user, "in"))
    if "source" not in flow or "sink" not in flow:
        return set()
    _, (ours, _) = nx.minimum_cut(flow, "source", "sink")
    return {n for n in forward if (n, "in") in ours and (n, "out") not in ours}


def _at_cuts(forward: Sequence[torch.fx.Node], late: Nodes) -> set[torch.fx.Node]:
    """What crosses the places that leave the least memory in all: what is kept, and the longest stretch between. What
    lies behind the last place is kept, as the backward pass begins with it."""
    place = {n: i for i, n in enumerate(forward)}
    until = {n: max((place[u] for u in n.users if u in place), default=-1) for n in forward}
    crossing = [0] * (len(forward) + 1)
    saved = [0] * len(forward)
    for node, last in until.items():
        size = _bytes(node)
        if size == float("inf") or is_view(node):
            continue
        for i in range(place[node] + 1, last + 1):  # in front of node i
            crossing[i] += int(size)
        if any(u in late for u in node.users):
            saved[place[node]] = int(size)
    total = sum(saved)
    best: tuple[float, list[int]] = (float("inf"), [])
    for count in _SEGMENTS:
        cuts = _cuts(saved, crossing, count)
        between = [sum(saved[a:b]) for a, b in zip([0, *cuts], [*cuts, len(forward)], strict=True)]
        best = min(best, (sum(crossing[c] for c in cuts) + max(between, default=total), cuts))
    cuts = best[1]
    behind = cuts[-1] if cuts else 0
    return {n for n in forward if place[n] >= behind or any(place[n] < c <= until[n] for c in cuts)}


def _cuts(saved: Sequence[int], crossing: Sequence[int], count: int) -> list[int]:
    """Places that cut what is saved into about equal parts, each where the least crosses nearby."""
    found: list[int] = []
    total, done, first = sum(saved), 0, 1
    for i, size in enumerate(saved):
        done += size
        if done * count >= total * (len(found) + 1) and len(found) < count - 1 and i + 1 < len(saved):
            found.append(min(range(first, i + 2), key=lambda c: (crossing[c], -c)))
            first = i + 2
    return sorted(set(found))


def _stays(node: torch.fx.Node) -> bool:
    """Whether a value is kept in any case: random numbers, whole numbers, and what is written to."""
    if node.op != "call_function":
        return True
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    source = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else node
    random = isinstance(source, torch.fx.Node) and is_random(source)
    return whole or random or (schema is not None and schema.is_mutable)


def _is_expensive(node: torch.fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if getattr(node.target, "__name__", "") == "getitem":
        return isinstance(node.args[0], torch.fx.Node) and _is_expensive(node.args[0])
    return packet in flop_registry or packet in _NEVER


def _bytes(node: torch.fx.Node) -> float:
    """What keeping a value takes; a view takes what it is a view of, and a tuple cannot be kept."""
    value = base(node).meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else float("inf")
