"""What is done to a step's graph before its compute is compiled; no value changes."""

from __future__ import annotations

import torch
import torch.fx

from autopar.ir.reuse import FUNCTIONAL
from autopar.ir.simplify import dropout_noise

aten = torch.ops.aten


def functional(graph: torch.fx.Graph) -> None:
    """Has each operator write to memory of its own. Nobody reads what was written over, so that no value changes."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = FUNCTIONAL.get(node.target, node.target)


def fold_cats_of_one(graph: torch.fx.Graph) -> None:
    """Reads a tensor instead of its concatenation with empty ones, as of a model's empty cache, which copies it. Only
    where operators alone read it: a collective may write over what it is given. Where the two lie otherwise in memory,
    which views and `as_strided` see, it becomes a copy, of which inductor keeps the layout."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        values = [n.meta.get("val") for n in (node, *node.args[0])]
        if not all(isinstance(v, torch.Tensor) for v in values):
            continue
        filled = [n for n in node.args[0] if n.meta["val"].numel()]
        if len(filled) != 1 or not all(isinstance(u.target, torch._ops.OpOverload) for u in node.users):
            continue
        before, after = filled[0].meta["val"], node.meta["val"]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            continue
        if (before.stride(), before.storage_offset()) == (after.stride(), after.storage_offset()):
            node.replace_all_uses_with(filled[0])
            graph.erase_node(node)
        elif after.is_contiguous():
            node.target, node.args = aten.clone.default, (filled[0],)
            node.kwargs = {"memory_format": torch.contiguous_format}


def noise_of_shapes(graph: torch.fx.Graph) -> None:
    """Has noise made from a shape rather than from a value of it, so that it need not wait for the value."""
    for node in graph.find_nodes(op="call_function", target=dropout_noise):
        like = node.args[0].meta.get("val")
        if like is None:  # as of what a strategy computes itself
            continue
        with like.fake_mode:
            value = torch.empty_like(like)
        node.target = shaped_noise
        node.args = (tuple(value.shape), value.stride(), value.dtype, value.device, node.args[1])
        node.meta["val"] = value


def shaped_noise(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, p: float
) -> torch.Tensor:
    """What `dropout_noise` gives for a value of this shape."""
    return dropout_noise(torch.empty_strided(shape, stride, dtype=dtype, device=device), p)
