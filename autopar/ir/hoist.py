"""Computes the indices of lookups first: whoever exchanges the rows of tables then does it once, for all of them."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx

from autopar.ir.lookups import LOOKUPS
from autopar.ir.structure import ancestors, is_random


def hoist_indices(graph: torch.fx.Graph, given: Collection[torch.fx.Node]) -> None:
    """Moves what indices are computed from to the front, where it needs nothing but `given` inputs and is small: whole
    numbers. The graph must not overwrite anything yet."""
    indices = [n for k in LOOKUPS for node in graph.find_nodes(op="call_function", target=k) for n in _indices(node)]
    needed, early = ancestors(indices), set(given)
    order = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    moved = [n for n in order if n in needed and _can_be_early(n, early)]
    first = next((n for n in order if n not in moved), None)
    if first is not None:
        for node in moved:
            first.prepend(node)


def _indices(lookup: torch.fx.Node) -> list[torch.fx.Node]:
    return [a for a in lookup.args[1:3] if isinstance(a, torch.fx.Node)]


def _can_be_early(node: torch.fx.Node, early: set[torch.fx.Node]) -> bool:
    value = node.meta.get("val")
    if (
        node.op != "call_function"
        or is_random(node)
        or not isinstance(value, torch.Tensor)
        or value.dtype.is_floating_point
        or value.dtype.is_complex
        or not set(node.all_input_nodes) <= early
    ):
        return False
    early.add(node)
    return True
