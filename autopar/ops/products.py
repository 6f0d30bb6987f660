"""Products of two thin matrices that are as large as a weight: formed, and used, a few rows at a time.

On a CPU, what is written and read at once stays in its cache, and no memory is taken that the allocator gives back to
the system after each step. [Empirical: a product of 51 MB takes 47 ms as a whole, of which 22 go to new pages, and 13
in pieces]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.ops.base import Call
from autopar.ops.values import Bytes, Setting

LARGE_BYTES = 1 << 25
"""From here on, CPUs form what may be formed in pieces a few rows at a time: glibc gives memory of this size back to
the system at once, and every new page costs."""
PIECE_BYTES = 1 << 20
"""Of a piece. [Empirical: half a MiB to two are alike within a few per cent, four take 10 % longer]"""
FROM_BYTES = LARGE_BYTES
"""What is smaller is formed as a whole."""


@dataclass(frozen=True)
class Product:
    """`left` [samples, rows] turned over, times `right` [samples, columns]; not computed yet."""

    left: torch.Tensor
    right: torch.Tensor

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Some rows of it."""
        return self.left[:, first : first + count].t() @ self.right

    def whole(self) -> torch.Tensor:
        return self.left.t() @ self.right


def rows_of_piece(tensor: torch.Tensor) -> int:
    """How many rows of a tensor, or of its gradient, are worked on at a time: all, unless it is large."""
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or size < FROM_BYTES:
        return len(tensor)
    return max(1, PIECE_BYTES * len(tensor) // size)


def formed_bytes(call: Call, setting: Setting) -> Bytes:
    """Bytes that a gradient takes that is formed as a product: none, where it is large and may be formed in pieces."""
    size = call.held_bytes(setting.world_size)
    return size * (size < LARGE_BYTES) if call.op.in_pieces and setting.rounds else size


def piece_bytes(call: Call, setting: Setting) -> Bytes:
    """Bytes that whoever uses such a gradient takes for a piece of it at a time; none where it is formed as a whole."""
    return PIECE_BYTES * (formed_bytes(call, setting) < call.held_bytes(setting.world_size))
