"""Server reduce: the sum over ranks that hosts which only serve help to make.

Bytes sent by a rank: S - s_r to those that add up, and (n-1) s_r of what it adds up itself; it receives as many. A
serving host that adds up s receives, and sends, n s. s_r is what rank r adds up, of S bytes over n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.backends import collectives
from autopar.backends.server_reduce import AHEAD, served_pieces
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ops.base import Call, Emission, Site
from autopar.ops.collectives import Collective, RankBytes
from autopar.ops.layouts import REPLICATE, summed
from autopar.ops.links import Links, Phase
from autopar.ops.values import Bytes, Setting, Value


@dataclass(frozen=True, slots=True)
class ServerReduce(Collective):
    """The sum over ranks, on every rank: each rank and each serving host adds up its part, and sends it to all."""

    name = "served_sum"
    in_place = True
    summed_by: tuple[int, ...] = ()
    """Elements that each rank adds up, and behind those each serving host, in the cluster's order."""

    def value(self, at: Emission) -> Value:
        assert len(self.summed_by) == at.world_size + len(at.context.servers), "one part for each that may add up"
        assert sum(self.summed_by) == at.inputs[0].elements, "the parts must cover the value"
        return replace(at.inputs[0].made, layout=summed(at.inputs[0].layout, (), REPLICATE))

    def in_rounds(self, call: Call) -> bool:
        return True

    def pieces(self, call: Call) -> int:
        return served_pieces(call.bytes)

    def passing_bytes(self, call: Call, setting: Setting) -> Bytes:
        """Pieces from every rank of what this one adds up, and their sums; narrow ones are widened as they are."""
        n, width, pieces = setting.world_size, DTYPE_BYTES[call.dtype], self.pieces(call)
        largest = np.array([-(-own // pieces) for own in self.summed_by[:n]], np.int64)
        return largest * (width * (AHEAD * n + AHEAD + 1) + (4 * (n + 1) if width < 4 else 0))

    def rank_bytes(self, call: Call, subgroup: tuple[int, ...]) -> RankBytes:
        n, width = len(subgroup), DTYPE_BYTES[call.dtype]
        moved = [call.bytes + (n - 2) * self.summed_by[r] * width for r in subgroup]
        return moved, moved

    def served_bytes(self, call: Call, world_size: int) -> list[int]:
        return [world_size * e * DTYPE_BYTES[call.dtype] for e in self.summed_by[world_size:]]

    def phases(self, call: Call, links: Links) -> list[Phase]:
        """Parts on their way to who adds them up, and sums on their way back, at the same time."""
        n, sizes = links.world_size, np.array(self.summed_by, float) * DTYPE_BYTES[call.dtype]
        ways = [way for i, s in enumerate(sizes[n:]) if s for r in range(n) for way in ((r, n + i, s), (n + i, r, s))]
        own = sizes[:n]
        return [(self.name, links.to_each((), own) + links.from_each((), own) + links.along(ways))]

    def write(self, site: Site, call: Call) -> Any:
        return site.call(collectives.server_reduce, (site.value_of(call.inputs[0]), self.summed_by, site.mesh()))
