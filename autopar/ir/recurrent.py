"""Recurrent layers as eager PyTorch computes them, where its tracing of them does otherwise.

Tracing writes them as single steps, or on CPUs as oneDNN's LSTM layers. Torch 2.13 leaves out the dropout between
layers (`_rnn_helper` compares the layer's number the wrong way round), and takes oneDNN's layers in 16 bits on CPUs
that have no such instructions, where they fail. And oneDNN's operator returns a workspace for the backward pass only
where autograd is on, whatever its argument `train` says; a captured graph runs with it off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten


@contextlib.contextmanager
def recurrent_dropout() -> Iterator[None]:
    """While it is open, recurrent layers are traced with the dropout between them."""
    from torch._decomp import decompositions

    traced = getattr(decompositions, "_rnn_helper", None)
    if traced is None:
        yield
        return

    def layers(
        given: torch.Tensor,
        hidden: Sequence[Any],
        parameters: Sequence[Any],
        has_biases: bool,
        count: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Any,
    ) -> tuple[torch.Tensor, list[Any]]:
        """All layers, one after the other, each traced by itself."""
        if layer is getattr(decompositions, "mkldnn_one_layer_lstm", None) and not _in_onednn(given.dtype):
            layer = decompositions.one_layer_lstm
        value, found = given.transpose(0, 1) if batch_first else given, []
        directions = 2 if bidirectional else 1
        for i in range(count):
            own = slice(directions * i, directions * (i + 1))
            value, last = traced(
                value, hidden[own], parameters[own], has_biases, 1, 0.0, train, bidirectional, False, layer
            )
            found += last
            if dropout and train and i < count - 1:
                value = torch.dropout(value, dropout, train=True)
        return value.transpose(0, 1) if batch_first else value, found

    decompositions._rnn_helper = layers
    try:
        yield
    finally:
        decompositions._rnn_helper = traced


def _in_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in a dtype on this CPU."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def keep_workspaces(graph: torch.fx.Graph) -> None:
    """Has oneDNN's recurrent layers return their workspace, and take batches of no samples; torch builds without oneDNN
    have no such layers."""
    if not hasattr(aten, "mkldnn_rnn_layer"):
        return
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = recurrent_layer
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer_backward.default):
        node.target = recurrent_layer_backward


def recurrent_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """oneDNN's layer for training; its arguments are the operator's."""
    given, _, _, _, _, hidden, cell = arguments[:7]
    if not given.numel():  # which oneDNN does not take
        *sizes, _ = given.shape
        return given.new_empty((*sizes, hidden.shape[-1])), hidden.clone(), cell.clone(), given.new_empty(0)
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments[:-1]]
    with torch.enable_grad():
        found: tuple[torch.Tensor, ...] = aten.mkldnn_rnn_layer.default(*detached, True)
    return found


def recurrent_layer_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """The layer's gradients; its arguments are the operator's."""
    if not arguments[0].numel():
        return tuple(torch.zeros_like(a) for a in arguments[:7])
    found: tuple[torch.Tensor, ...] = aten.mkldnn_rnn_layer_backward.default(*arguments)
    return found
