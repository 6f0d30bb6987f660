"""What a calibration says of collectives that were not measured themselves: other sizes, other owners, other shares.

The flows of a collective, and so its time by the cluster's figures, are known for any message. A calibration says how
far these times are off for even messages of a few sizes; what lies between is taken from straight lines in logarithms,
and what lies outside is off by as much as the nearest. So a link that is slower than its data sheet, a library that
reaches less of it, or processors that cannot keep up are found once, and hold for every message.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np

from autopar.ir.primitives import DTYPE_BYTES, Kind, Primitive, Teams, all_teams, wire_bytes
from autopar.spec.calibration import Calibration, CollectiveTimes

WIDTH = 4
"""Bytes of a value that was measured: float32."""


class Factors:
    """Measured over computed times, by kind of collective, teams and size."""

    def __init__(self, calibration: Calibration, world_size: int, computed_s: Callable[[Primitive], float]) -> None:
        """`computed_s`: seconds of a collective by the cluster's figures."""
        self._world_size = world_size
        self._tables: dict[tuple[Kind, Teams], tuple[list[float], list[float]]] = {}
        for times in calibration.collectives:
            sizes, factors = [], []
            for size, seconds in zip(times.size_bytes, times.seconds, strict=True):
                sizes.append(float(np.log(size)))
                factors.append(float(np.log(seconds / computed_s(measured(times, size, world_size)))))
            self._tables[Kind(times.kind), times.teams] = sizes, factors

    def of(self, primitive: Primitive) -> float:
        """For one collective. Teams that were not measured are taken for all ranks together, kinds that were not for
        an all-reduce; 1 where nothing was measured."""
        for key in ((primitive.kind, primitive.teams), (primitive.kind, ()), (Kind.ALL_REDUCE, ())):
            if key in self._tables:
                sizes, factors = self._tables[key]
                return float(np.exp(np.interp(np.log(max(1, self._size(primitive))), sizes, factors)))
        return 1.0

    def _size(self, primitive: Primitive) -> int:
        """What each team sums up may be a part of the value."""
        if primitive.kind is not Kind.ALL_REDUCE:
            return primitive.bytes
        most = max(primitive.held_elements(rank) for rank in range(self._world_size))
        return most * DTYPE_BYTES[primitive.dtype]


def host_bytes_per_s(calibration: Calibration, world_size: int) -> float | None:
    """Bytes, sent and received together, that one processor core moves: the median over large messages."""
    found = []
    for times in calibration.collectives:
        for size, seconds in zip(times.size_bytes, times.processor_s, strict=True):
            if size >= 1 << 20 and seconds > 0:
                sent, received = wire_bytes(measured(times, size, world_size), world_size)
                found.append((sum(sent) + sum(received)) / world_size / seconds)
    return median(found) if found else None


def measured(times: CollectiveTimes, size_bytes: int, world_size: int) -> Primitive:
    """What was measured at a size: even shares, and rank 0 as the owner where there is one."""
    kind, elements = Kind(times.kind), size_bytes // WIDTH
    splits: tuple[int, ...] = ()
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL):
        team_of = {rank: team for team in all_teams(times.teams, world_size) for rank in team}
        splits = tuple(elements // len(team_of[rank]) for rank in range(world_size))
    owner = 0 if kind in (Kind.REDUCE, Kind.BROADCAST) else None
    return Primitive(0, kind, 0, (), elements, "float32", 0, splits=splits, owner=owner, teams=times.teams)
