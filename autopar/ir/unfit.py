"""What in a model's graph no captured step would do as the model does it."""

from __future__ import annotations

import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.checkpointed import line_of, refuse_writes
from autopar.ir.held_writes import refuse_writes_to_held

_MISREAD = ("multilabel_margin_loss",)
"""Functions that PyTorch's tracing takes apart into operators which compute something else [seen with torch 2.13]."""


def refuse_unfit(graph: torch.fx.GraphModule) -> None:
    """Raises `CaptureError`, with the user's line, for TorchDynamo's graph of a model that has such a thing."""
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") in _MISREAD:
            raise CaptureError(f"PyTorch's tracing gives other numbers for '{node.target.__name__}'{line_of(node)}")
    refuse_writes(graph)
    refuse_writes_to_held(graph)


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules that there are, which PyTorch cannot trace here."""
    return bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]
