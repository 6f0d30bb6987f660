"""Which gradients a backward pass will come to, read off the autograd graph before it begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction


def reachable(begun: Iterable[torch.Tensor], sought: Iterable[Any]) -> set[Any] | None:
    """Those nodes of `sought`, gradient accumulators of parameters, to which gradients of `begun` flow. `None` where
    that cannot be said: a function that is written in Python, as a reentrant checkpoint is one, may begin a backward
    pass of its own, through a graph that cannot be seen from here."""
    left, sought = set(sought), set(sought)
    todo = [t.grad_fn for t in begun if t.grad_fn is not None]
    known: set[Any] = set(todo)  # and keeps them: autograd's nodes are made anew for whoever asks
    while todo:
        node = todo.pop()
        if isinstance(node, BackwardCFunction):
            return None
        for behind, _ in node.next_functions:
            if behind is not None and behind not in known:
                known.add(behind)
                left.discard(behind)
                todo.append(behind)
    return sought - left
