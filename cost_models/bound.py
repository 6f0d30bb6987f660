"""A lower bound of the step time, for many plans at once.

No step is shorter than what its busiest device computes, nor than its busiest link is filled. Both are sums over the
plan's groups, so each group is priced once, and a plan's bound is a sum of rows: some hundred thousand plans a second.
What can be hidden, what waits for what and what gets in each other's way only makes a step longer; the simulation
finds out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.cost_models.alike import alike
from autopar.cost_models.analytic import StepPricer
from autopar.strategies.lowering import StepProgram

Floats = npt.NDArray[np.float64]


class Bound:
    """Lower bounds of step times, of plans for one graph on one topology."""

    def __init__(self, pricer: StepPricer) -> None:
        self.pricer = pricer
        whole = pricer.graph_s(frozenset())
        ranks, links = len(whole), len(pricer.network.links) + len(pricer.network.hosts)
        self._ranks = ranks
        self._graph: Floats = np.concatenate([whole, np.zeros(links)])
        self._rows: list[Floats] = []
        self._table: Floats = np.zeros((0, 0))
        """The rows, and that of the graph behind them, of the ranks and links that can be the busiest."""

    def add(self, alone: StepProgram) -> int:
        """Takes a group in, lowered by itself; returns the number that it goes by. The step's own sums are left out."""
        row = np.zeros_like(self._graph)
        for price in self.pricer.group_prices(alone):
            row[: self._ranks] += price.device_s
            if price.transfer and len(price.transfer.loads):
                row[self._ranks :] += price.transfer.seconds * price.transfer.loads
        if alone.replaced:
            row[: self._ranks] += self.pricer.graph_s(alone.replaced) - self._graph[: self._ranks]
        self._rows.append(row)
        return len(self._rows) - 1

    def of(self, plans: npt.NDArray[np.int64] | Sequence[Sequence[int]]) -> Floats:
        """Seconds that no step is shorter than, for each plan: [plans, groups], the numbers of each plan's groups. All
        have as many groups."""
        if len(self._table) <= len(self._rows):
            rows = np.stack([*self._rows, self._graph])
            self._table = _undominated(rows[:, alike([rows], rows.shape[1])[0]])
        chosen = np.asarray(plans, np.int64)
        total = np.repeat(self._table[-1:], len(chosen), axis=0)
        for column in chosen.T:
            total += self._table[column]
        found: Floats = total.max(axis=1)
        return found


def _undominated(table: Floats) -> Floats:
    """Columns that are the largest of some sum of rows: those nowhere above another one are left out."""
    order = np.argsort(-table.sum(axis=0), kind="stable")
    kept = np.empty((len(order), len(table)))
    count = 0
    for column in table.T[order]:
        if not (kept[:count] >= column).all(axis=1).any():
            kept[count] = column
            count += 1
    return np.ascontiguousarray(kept[:count].T)
