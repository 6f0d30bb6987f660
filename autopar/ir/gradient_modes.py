"""In which of PyTorch's modes gradients are recorded and computed, whatever mode the caller is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def gradients_recorded() -> Iterator[None]:
    """While it is open, as a model is looked at and planned for, autograd records, also where a caller has
    `torch.no_grad()` or `torch.inference_mode()` set: what is made within it is trained outside of them."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def outside_of_autocast() -> Iterator[None]:
    """While it is open, autocast is off: a backward pass computes in the formats of its forward pass, as PyTorch's
    manual asks for and captured ones do. Within autocast, a float32 region's gradients would be products in 16 bits."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
