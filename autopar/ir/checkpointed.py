"""Parts of a model that run under `torch.utils.checkpoint`, and write to buffers.

Eager PyTorch runs such a part again in the backward pass, so that batch normalization, say, counts each batch twice.
TorchDynamo's graph has it once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

import torch
import torch.fx
from torch.nn import functional as F

from autopar.errors import CaptureError

_OPERATORS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_NORMS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)
_TRAINING = 5
"""Which of a normalization's arguments says that it takes the batch's statistics, and updates those that are kept."""
_VIEWS = ("detach", "view", "reshape", "unsqueeze", "squeeze", "select", "narrow", "flatten", "__getitem__")
_FRAME = re.compile(r'File "(.+)", line (\d+), in ')


def refuse_writes(graph: torch.fx.GraphModule) -> None:
    """Raises `CaptureError` where a part of TorchDynamo's graph that is run again writes to a buffer."""
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") in _OPERATORS and isinstance(node.args[0], torch.fx.Node):
            writes = next(_writes(getattr(graph, str(node.args[0].target))), None)
            if writes is not None:
                raise CaptureError(
                    "a part of the model under torch.utils.checkpoint writes to buffers, as batch normalization does: "
                    "eager PyTorch runs it twice a step, and writes twice, which a captured step would not"
                    f"{line_of(writes)}"
                )


def _writes(body: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes that write to buffers."""
    for node in body.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "get_attr" and isinstance(inner := getattr(body, name, None), torch.fx.GraphModule):
            yield from _writes(inner)
        elif node.op not in ("call_function", "call_method") or not node.args:
            continue
        elif node.target in _NORMS:
            training = node.args[_TRAINING] if len(node.args) > _TRAINING else node.kwargs.get("training", True)
            if training and len(node.args) > 1 and _is_buffer(node.args[1]):
                yield node
        elif _is_in_place(node, name) and _is_buffer(node.args[0]):
            yield node


def _is_in_place(node: torch.fx.Node, name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or node.target in (operator.setitem, operator.iadd)


def _is_buffer(value: object) -> bool:
    """Whether a value is a buffer, or a view of one."""
    while isinstance(value, torch.fx.Node) and value.op != "placeholder":
        if value.target not in _VIEWS and value.target is not operator.getitem:
            return False
        value = value.args[0]
    return isinstance(value, torch.fx.Node) and "_buffers_" in str(value.target)


def line_of(node: torch.fx.Node) -> str:
    """The innermost of the user's lines that a node comes from, as messages end with it; empty where none is known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f"\n  at {file}:{line}" for file, line in frames if "/torch/" not in file and "/autopar/" not in file]
    return own[-1] if own else ""
