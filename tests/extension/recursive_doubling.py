"""Recursive doubling: an operation of our own, and a strategy that uses it, in one file.

In round k, each rank exchanges what it has with the rank whose number differs in bit k, and adds up: after log2(n)
rounds all have the sum. It sends log2(n) times the value, where a ring sends 2 (n-1)/n of it, in fewer rounds (Thakur
et al., "Optimization of Collective Communication Operations in MPICH", 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from autopar.backends.collectives import registered
from autopar.backends.exchange import Messages
from autopar.ops.base import Call, Emission, Site
from autopar.ops.collectives import Collective, RankBytes
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.ops.layouts import REPLICATE, summed
from autopar.ops.links import Links, Phase
from autopar.ops.values import Setting, Value
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter


@dataclass(frozen=True, slots=True)
class Doubling(Collective):
    """The sum over ranks, on every rank."""

    name = "doubling"
    in_place = True

    def value(self, at: Emission) -> Value:
        return replace(at.inputs[0].made, layout=summed(at.inputs[0].layout, (), REPLICATE))

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        return call.bytes

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        moved = [len(bits(len(subgroup))) * call.bytes] * len(subgroup)
        return moved, moved

    def phases(self, call: Call, links: Links) -> list[Phase]:
        n, size = links.world_size, float(call.bytes)
        return [("all_reduce", links.along([(r, r ^ bit, size) for r in range(n)])) for bit in bits(n)]

    def rounds(self, size: int, phases: int, chains: bool) -> int:
        return phases

    def in_rounds(self, call: Call) -> bool:
        return True

    def write(self, site: Site, call: Call) -> Any:
        return site.call(begin, (site.value_of(call.inputs[0]), self.channel(site, call)))


def bits(n: int) -> list[int]:
    return [1 << k for k in range(n.bit_length() - 1)]


def begin(x: torch.Tensor, group: str) -> torch.Tensor:
    """Starts the sum, in place."""
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    return registered(x, _Doubling(x, pg.rank(), pg).begin())


class _Doubling(Messages):
    def __init__(self, x: torch.Tensor, rank: int, pg: dist.ProcessGroup) -> None:
        super().__init__(rank, pg)
        self._x = x

    def _messages(self) -> None:
        received = torch.empty_like(self._x)
        for bit in bits(self._pg.size()):
            other = self._rank ^ bit
            works = [self._receive(received, other, bit), self._send(self._x, other, bit)]
            for work in works:
                if work is not None:
                    work.wait()
            self._x += received

    def _forget(self) -> None:
        self._x = torch.empty(0)


class RecursiveDoubling(Strategy):
    name = "recursive_doubling"
    summary = "sum by exchanges with one partner after the other; every rank updates its replica"

    def applies(self, member: Member, context: Context) -> str | None:
        n = context.world_size
        return None if n & (n - 1) == 0 else f"{n} ranks are no power of two"

    def options(self, context: Context) -> Sequence[Options]:
        return [Options()]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        emit.update(emit.wait(emit.collective(Doubling(), emit.pack(group))), group)
