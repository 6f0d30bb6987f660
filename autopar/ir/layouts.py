"""Group normalization of memory that lies otherwise than tracing has said.

Its kernels refuse what is not laid out as they ask, and whether a copy is needed is decided while tracing. Of a
dimension with one element, as a batch of one sample has, PyTorch's shape rule for views says another stride than its
kernels, and strides decide. So there it is decided again in the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def group_norms_where_they_lie(graph: torch.fx.Graph) -> None:
    """Has group normalization copy its input if its kernel asks for that, where a dimension has one element."""
    for op, place, replacement in (
        (aten.native_group_norm.default, 0, group_norm),
        (aten.native_group_norm_backward.default, 1, group_norm_backward),
    ):
        for node in graph.find_nodes(op="call_function", target=op):
            shape = node.args[place].meta["val"].shape
            if any(isinstance(size, int) and size == 1 for size in shape):
                node.target = replacement


def group_norm(x: torch.Tensor, *rest: Any) -> Any:
    """The operator, on its input in the layout that its strides suggest."""
    return aten.native_group_norm.default(x.contiguous(memory_format=suggest_memory_format(x)), *rest)


def group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    """The operator, on a gradient and an input in the layout that the input's strides suggest."""
    layout = suggest_memory_format(x)
    ready = (t.contiguous(memory_format=layout) for t in (gradient, x))
    return aten.native_group_norm_backward.default(*ready, *rest)
