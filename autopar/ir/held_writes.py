"""Arrays and tensors that a model holds for itself, and writes to."""

from __future__ import annotations

import torch
import torch.fx

from autopar.errors import CaptureError
from autopar.ir.checkpointed import line_of

_REGISTERED = ("_parameters_", "_buffers_", "L_tensors_")
"""In names of parameters, buffers and the batch's tensors, of which AOTAutograd sees what is written to them."""


def refuse_writes_to_held(graph: torch.fx.GraphModule) -> None:
    """Raises `CaptureError` where TorchDynamo's graph writes to what is a constant of it: each step would begin with
    what tracing has left there, and of an array of NumPy's nothing else says so."""
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        written = isinstance(value, torch.Tensor) and not value.is_inference() and value._version > 0
        if written and not any(name in str(node.target) for name in _REGISTERED):
            raise CaptureError(
                "the model writes in place to an array or a tensor that is neither a parameter nor a buffer"
                f"{line_of(node)}\n  Register a tensor with register_buffer(name, tensor): the captured step keeps "
                "buffers up to date."
            )
