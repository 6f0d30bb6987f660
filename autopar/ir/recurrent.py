"""LSTM layers on CPUs, as oneDNN computes them: the forward pass keeps what the backward pass reads.

oneDNN's operator returns a workspace for the backward pass only where autograd is on, whatever its argument `train`
says, and a captured graph runs with autograd off.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

aten = torch.ops.aten


def keep_workspaces(graph: torch.fx.Graph) -> None:
    """Has oneDNN's recurrent layers return their workspace; torch builds without oneDNN have no such layers."""
    layer = getattr(aten, "mkldnn_rnn_layer", None)
    if layer is None:
        return
    for node in graph.find_nodes(op="call_function", target=layer.default):
        node.target = recurrent_layer


def recurrent_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """oneDNN's layer for training; its arguments are the operator's."""
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments[:-1]]
    with torch.enable_grad():
        found: tuple[torch.Tensor, ...] = aten.mkldnn_rnn_layer.default(*detached, True)
    return found
