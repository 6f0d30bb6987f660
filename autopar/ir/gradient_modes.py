"""Gradients are recorded while a model is looked at and planned for, whatever mode the caller is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def gradients_recorded() -> Iterator[None]:
    """While it is open, autograd records, also where a caller has `torch.no_grad()` or `torch.inference_mode()` set:
    what is made within it is trained outside of them."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
