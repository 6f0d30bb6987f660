"""Bytes on the wire, of a model wide enough that gradients are most of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autopar.lab import this_machine
from autopar.ops.collectives import served_bytes, wire_bytes
from autopar.runtime.program import Program
from autopar.testing.tasks import Batch, Task, seeded

STEPS = 5
SAMPLES, WORDS = 60, 500


class _Wide(nn.Module):
    """Two linear layers, of which the second scores classes, and a table of which each sample looks five rows up."""

    def __init__(self, size: int, width: int, words: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, width), nn.Linear(width, size)
        self.table = nn.Embedding(words, width)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x) + self.table(words).sum(1))
        scores: torch.Tensor = self.second(hidden)
        return scores


def _task(name: str, size: int, width: int, words: int) -> Task:
    def batch(samples: int, seed: int) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        looked_up = torch.randint(0, words // 2, (samples, 5), generator=draw)
        given = torch.randn(samples, size, generator=draw), looked_up
        return given, torch.randint(0, size, (samples,), generator=draw)

    return Task(name, seeded(lambda: _Wide(size, width, words), torch.float32), batch, F.cross_entropy)


WIDE = _task("wide", 500, 1001, WORDS)
NARROW = _task("narrow", 60, 30, 50)
"""The same with few elements, and as many messages: what these take beyond what is declared, as the head of each does,
those of the wide one take, too."""
_HEAD = 52
"""Bytes of a segment's head: 20 of IPv4, 32 of TCP with its time stamps."""


def seen_and_declared(program: Program, batch: Any) -> tuple[int, int]:
    """Bytes that a step sends, over all ranks: seen at the loopback of a namespace that holds these ranks alone, and
    declared by the lowering. By all ranks together."""
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
    return min(looks), sum(sum(wire_bytes(c, n)[0]) + sum(served_bytes(c, n)) for c in lowered.calls)


def _sent() -> int:
    """What was sent so far, less the heads of TCP's segments."""
    sent = this_machine().bytes_sent()
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return sent - _HEAD * int(values[names.index("OutSegs")])
