"""Tables with `sparse=True`: their gradients are dense in a captured step, in which strategies find the rows that were
looked up by themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

_BY_PLACE: dict[Any, int] = {torch.embedding: 4, torch.embedding_bag: 5}
"""Where `sparse` stands among the arguments of lookups that Python cannot read the signatures of."""
_LOOKUPS: tuple[Callable[..., Any], ...] = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)


def with_dense_gradients(graph: torch.fx.GraphModule) -> None:
    """Has all lookups of TorchDynamo's graph, which is changed in place, leave dense gradients."""
    for node in graph.graph.nodes:
        place = _place(node.target) if node.op == "call_function" else None
        if place is None:
            continue
        if len(node.args) > place:
            node.args = (*node.args[:place], False, *node.args[place + 1 :])
        elif "sparse" in node.kwargs:
            node.kwargs = {**node.kwargs, "sparse": False}


def _place(target: Any) -> int | None:
    if any(target is f for f in _LOOKUPS):
        return list(inspect.signature(target).parameters).index("sparse")
    return next((place for f, place in _BY_PLACE.items() if target is f), None)
