"""Which nodes of a graph share memory: views, and what may be one."""

from __future__ import annotations

import operator
from functools import cache

import torch
import torch.fx

aten = torch.ops.aten

MAYBE_VIEWS = frozenset(
    {aten.reshape.default, aten.contiguous.default, aten.lift_fresh.default, aten._unsafe_view.default}
)
"""Operators that return a view, always or as the strides have it, without saying so in their schema."""


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node's value may share memory with its first input."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    return isinstance(node.target, torch._ops.OpOverload) and _returns_views(node.target)


@cache
def _returns_views(target: torch._ops.OpOverload) -> bool:
    if target in MAYBE_VIEWS:
        return True
    returns = target._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def base(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory this one may share."""
    while is_view(node):
        first = node.args[0]
        if not isinstance(first, torch.fx.Node):
            break
        node = first
    return node


def repeats_memory(value: object) -> bool:
    """Whether elements of a tensor lie in one memory, as those of an expanded one do."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Every node that reads this node's memory, through views too; the views themselves are among them."""
    found: set[torch.fx.Node] = set()
    frontier = [node]
    while frontier:
        for user in frontier.pop().users:
            if user not in found:
                found.add(user)
                if is_view(user):
                    frontier.append(user)
    return found


def is_written(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether an operator that reads `node`'s memory writes to it."""
    target = user.target
    if user.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    written = [a for a, s in zip(user.args, target._schema.arguments, strict=False) if s.is_write]
    return any(isinstance(a, torch.fx.Node) and base(a) is base(node) for a in written)
