"""Messages of unequal parts: what an all-to-all sends."""

from __future__ import annotations

import operator
from typing import Any

import torch

from autopar.ops.base import Site

Message = tuple[torch.Tensor, list[int], list[int]]
"""A flat value, how much of it goes to each rank, and how much comes from each."""


def unpacked(site: Site, message: Any) -> list[Any]:
    """A message's three parts."""
    return [site.call(operator.getitem, (message, i)) for i in range(3)]
