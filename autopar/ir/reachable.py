"""Which gradients a backward pass will come to, read off the autograd graph before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction


def reachable(begun: Iterable[torch.Tensor], sought: Iterable[Any]) -> set[Any] | None:
    """Those nodes of `sought`, gradient accumulators of parameters, to which gradients of `begun` flow. `None` where
    that cannot be said: a function that is written in Python, as a reentrant checkpoint is one, may begin a backward
    pass of its own, through a graph that cannot be seen from here."""
    left, sought = set(sought), set(sought)
    for node in _behind(begun):
        if isinstance(node, BackwardCFunction):
            return None
        left.discard(node)
    return sought - left


def has_reentrant_checkpoint(begun: Iterable[torch.Tensor]) -> bool:
    """Whether gradients flow through a checkpoint that begins a backward pass of its own, which `torch.autograd.grad`
    does not take."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in _behind(begun))


def _behind(begun: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graph that lie behind tensors, each once."""
    todo = [t.grad_fn for t in begun if t.grad_fn is not None]
    known: set[Any] = set(todo)  # and keeps them: autograd's nodes are made anew for whoever asks
    while todo:
        node = todo.pop()
        yield node
        new = {behind for behind, _ in node.next_functions if behind is not None} - known
        known |= new
        todo += new
