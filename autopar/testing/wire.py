"""Bytes on the wire, of a model wide enough that gradients are most of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autopar.ops.collectives import served_bytes, wire_bytes
from autopar.runtime.program import Program
from autopar.testing.tasks import Batch, Task, seeded

STEPS = 5
SAMPLES, WORDS = 60, 500
MESSAGE_BYTES = 512
"""Of each message of a ring, sent besides what it holds: headers of TCP/IP and of the library, and acknowledgements.
[Empirical: all-reduces of 8 bytes to 100 kB with gloo, 2 to 5 ranks]"""


class _Wide(nn.Module):
    """Two linear layers, of which the second scores classes, and a table of which each sample looks five rows up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(500, 1001), nn.Linear(1001, 500)
        self.table = nn.Embedding(WORDS, 1001)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x) + self.table(words).sum(1))
        scores: torch.Tensor = self.second(hidden)
        return scores


def _batch(samples: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS // 2, (samples, 5), generator=draw)
    return (torch.randn(samples, 500, generator=draw), words), torch.randint(0, 500, (samples,), generator=draw)


WIDE = Task("wide", seeded(_Wide, torch.float32), _batch, F.cross_entropy)


def seen_and_declared(program: Program, batch: Any) -> tuple[int, int, int]:
    """Bytes that a step sends, over all ranks: seen at the loopback of a namespace that holds these ranks alone, and
    declared by the lowering; and those that messages take besides. By all ranks together."""
    n = program.world_size
    program.step(batch)
    program.synchronize()
    dist.barrier()
    looks = []
    for _ in range(STEPS):
        before = _sent()
        dist.barrier()
        program.step(batch)
        program.synchronize()
        dist.barrier()
        looks.append(_sent() - before)
    lowered = program.compile_for(batch).program
    # On a busy machine TCP sends segments twice, never fewer than once.
    declared = sum(sum(wire_bytes(c, n)[0]) + sum(served_bytes(c, n)) for c in lowered.calls)
    messages = n * 2 * (n - 1) * sum(c.is_pending for c in lowered.calls)
    return min(looks), declared, messages * MESSAGE_BYTES


def _sent() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())
