"""NCCL, for NVIDIA GPUs. It has a reduce-scatter of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.backends.base import COLLECTIVES, Backend, Begun
from autopar.ir.dtypes import EXACT_BYTES


@dataclass(frozen=True)
class Nccl(Backend):
    """Equal parts are added up on their way, but for narrow numbers, which would be rounded each time."""

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int], rank: int, pg: Any) -> Begun:
        if len(set(sizes)) > 1 or x.element_size() < EXACT_BYTES:
            return super().reduce_scatter(x, sizes, rank, pg)
        out = x.new_empty(sizes[rank])
        return out, dist.reduce_scatter_tensor(out, x, group=pg, async_op=True)


NCCL = Nccl(
    "nccl",
    # Ring, simple protocol: 8.4 us, and 2.7 to 14 us a step over a network (NCCL 2.x, src/graph/tuning.cc).
    call_s=8.4e-6,
    hop_s=3e-6,
    issue_s=10e-6,
    # NCCL's own model takes 0.92 of the bus for its LL128 protocol; its reduce and broadcast are a single ring.
    fraction=dict.fromkeys(COLLECTIVES, 0.92),
    # Compute beside a collective takes 1.1256 times as long on A100 (Galvatron's shipped overlap coefficient).
    device_taken=1 - 1 / 1.1256,
    chains=True,
    sums=True,
)
