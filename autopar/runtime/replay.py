"""Running what was captured, as it was captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """While it is open, a captured graph computes what its operators say: those that autocast puts before a product are
    among them, so the caller's autocast, which may be on, adds none. Nothing is recorded for differentiation."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield
