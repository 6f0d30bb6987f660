"""Finds a model's equal layers in the order of its operators: runs that repeat, as the layers of a transformer do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

_LEAST_PERIOD = 4
"""Operators of a layer that is worth a region of its own."""


@dataclass(frozen=True)
class Run:
    """Equal layers, one after the other."""

    first: int
    """Position at which the first one begins."""
    period: int
    """Operators of a layer."""
    count: int

    @property
    def starts(self) -> list[int]:
        """Where each begins, and where the last one ends."""
        return [self.first + self.period * i for i in range(self.count + 1)]


def repeats(signatures: Sequence[Hashable], broken: Sequence[int]) -> list[Run]:
    """The longest runs of equal layers that do not overlap. `broken`: what it costs to cut before each position; layers
    begin where it is least."""
    number: dict[Hashable, int] = {}
    ids = torch.tensor([number.setdefault(s, len(number)) for s in signatures])
    free = torch.ones(len(ids), dtype=torch.bool)
    found: list[Run] = []
    while (best := _longest(ids, free)) is not None:
        first, period, length = best
        run = _placed(first, period, length, broken)
        free[first : first + length] = False
        if run is not None:
            found.append(run)
    return sorted(found, key=lambda r: r.first)


def _longest(ids: torch.Tensor, free: torch.Tensor) -> tuple[int, int, int] | None:
    """First position, period and length of the free run that covers most positions, with the smallest period."""
    best: tuple[int, int, int] | None = None
    for period in range(_LEAST_PERIOD, len(ids) // 2 + 1):
        same = (ids[:-period] == ids[period:]) & free[:-period] & free[period:]
        if int(same.sum()) < period:
            continue
        edges = torch.diff(torch.cat([torch.zeros(1), same.float(), torch.zeros(1)]))
        begins, ends = (edges > 0).nonzero().flatten(), (edges < 0).nonzero().flatten()
        longest = int((ends - begins).argmax())
        length = int(ends[longest] - begins[longest])
        if length >= period and (best is None or length + period > best[2]):
            best = (int(begins[longest]), period, length + period)
    return best


def _placed(first: int, period: int, length: int, broken: Sequence[int]) -> Run | None:
    offsets = range(min(period, length - period + 1))
    offset = min(offsets, key=lambda o: (broken[first + o + period * ((length - o) // period // 2)], o))
    count = (length - offset) // period
    return Run(first + offset, period, count) if count > 1 else None


def offsets_of_cuts(runs: Iterable[Run], within: Iterable[int]) -> set[int]:
    """Where regions begin: where layers do, and where any of a run's layers is cut, in all of them."""
    positions, found = sorted(within), set()
    for run in runs:
        end = run.starts[-1]
        offsets = {(p - run.first) % run.period for p in positions if run.first <= p < end}
        found |= {start + o for start in run.starts[:-1] for o in offsets | {0}} | {end}
    return found
