"""A lower bound of the step time, for many plans at once.

No step is shorter than what its busiest device computes, nor than its busiest link is filled. Nor is it shorter than
what lies before and behind a window of its compute, and what is sent within it: a gradient is sent once it is there,
and what a pass reads is gathered before, so what the network has to carry between the two cannot be moved elsewhere
(the bound of the one-machine problem with release times and tails, as in Carlier, 1982). All are sums over the plan's
groups, so each group is priced once, and a plan's bound is a sum of rows: some ten thousand plans a second and more.
What waits for what and what gets in each other's way only makes a step longer; the simulation finds out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_models.alike import alike
from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.price import Transfer
from autopar.strategies.lowering import StepProgram
from autopar.strategies.schedule import deadlines

Floats = npt.NDArray[np.float64]

PARTS = 6
"""Windows begin and end at the borders of so many parts of a step's compute, of equal time, and at the beginning of the
backward pass."""


@dataclass(frozen=True)
class _Sent:
    """A transfer of a group, and the window that it lies in whatever else is sent."""

    transfer: Transfer
    begin: int
    """Of the borders, the last one that lies before what it sends is there."""
    end: int
    """Of the borders, the first one behind which what it brings has been read."""


@dataclass(frozen=True)
class _Row:
    """What one group adds."""

    device_s: Floats
    """By rank."""
    sent: Sequence[_Sent]
    saved_s: float
    """The most that a rank need not compute of the graph."""


class Bound:
    """Lower bounds of step times, of plans for one graph on one topology whose groups lie in the order in which their
    gradients are complete."""

    def __init__(self, pricer: StepPricer) -> None:
        self.pricer = pricer
        self._graph_s = pricer.graph_s(frozenset())
        prefixes = np.array(pricer.graph_streams.prefix_s)
        # Of ranks that compute at different speeds, the fastest is at each place first, and has the least before it.
        before, behind = prefixes.min(axis=0), (prefixes[:, -1:] - prefixes).min(axis=0)
        nodes = before.shape[0] - 1
        cuts = np.searchsorted(before, before[-1] * np.arange(1, PARTS) / PARTS).tolist()
        self._borders = sorted({0, *cuts, pricer.graph.backward_start, nodes})
        """In nodes of the graph, the first and the last of all included."""
        self._before_s, self._behind_s = before[self._borders], behind[self._borders]
        self._rows: list[_Row] = []
        self._table: Floats = np.zeros((0, 0))
        """The rows, and that of the graph behind them, of what can decide the bound."""

    def add(self, alone: StepProgram) -> int:
        """Takes a group in, lowered by itself; returns the number that it goes by. The step's own sums are left out."""
        device_s, saved_s = np.zeros_like(self._graph_s), 0.0
        prices = self.pricer.group_prices(alone)
        for price in prices:
            device_s += price.device_s
        if alone.replaced:
            saved = self._graph_s - self.pricer.graph_s(alone.replaced)
            device_s, saved_s = device_s - saved, float(saved.max())
        self._rows.append(_Row(device_s, self._sent(alone, [p.transfer for p in prices]), saved_s))
        return len(self._rows) - 1

    def of(self, plans: npt.NDArray[np.int64] | Sequence[Sequence[int]]) -> Floats:
        """Seconds that no step is shorter than, for each plan: [plans, groups], the numbers of each plan's groups. All
        have as many groups."""
        if len(self._table) <= len(self._rows):
            self._table = _undominated(self._columns())
        chosen = np.asarray(plans, np.int64)
        total = np.repeat(self._table[-1:], len(chosen), axis=0)
        for column in chosen.T:
            total += self._table[column]
        found: Floats = total.max(axis=1)
        return found

    def _sent(self, alone: StepProgram, transfers: Sequence[Transfer | None]) -> list[_Sent]:
        """What a group sends. Beside other groups it sends nothing sooner, and waits for nothing later."""
        due = deadlines(alone.calls)[1]
        last = len(self._borders) - 1
        found = []
        for call, position in alone.placed:
            transfer = transfers[call.index] if call.group is not None else None
            if transfer is None:
                continue
            begin, end = 0, last
            if not call.deferred and not call.completes_step_before:  # else it may be sent beside the step to come
                begin = bisect_right(self._borders, position + 1) - 1
                if call.index in due:
                    end = bisect_left(self._borders, due[call.index] + 1)
            found.append(_Sent(transfer, max(begin, 0), max(begin, min(end, last))))
        return found

    def _columns(self) -> Floats:
        """[rows and the graph behind them, what can be the busiest]: ranks, and links and channels in each window."""
        ranks = np.stack([*(row.device_s for row in self._rows), self._graph_s])
        found = [ranks[:, alike([ranks], ranks.shape[1])[0]]]
        transfers = list({id(sent.transfer): sent.transfer for row in self._rows for sent in row.sent}.values())
        if transfers:
            filled = self._filled_s(transfers)
            of = {id(transfer): line for transfer, line in zip(transfers, filled, strict=True)}
            found += self._in_windows(of, filled.shape[1])
        return np.concatenate(found, axis=1)

    def _filled_s(self, transfers: Sequence[Transfer]) -> Floats:
        """Seconds for which each transfer fills each kind of link, each host, and each channel: [transfers, any]."""
        links = max(len(t.loads) for t in transfers)
        loads = np.zeros((len(transfers), links))
        channels: dict[Hashable, int] = {}
        numbers = [channels.setdefault((t.channel, t.at_once), len(channels)) for t in transfers]
        taken = np.zeros((len(transfers), len(channels)))
        for i, transfer in enumerate(transfers):
            loads[i, : len(transfer.loads)] = transfer.seconds * transfer.loads
            taken[i, numbers[i]] = transfer.seconds / transfer.at_once
        kinds = alike([loads], links)[0] if links else np.zeros(0, np.int64)
        return np.concatenate([loads[:, kinds], taken], axis=1)

    def _in_windows(self, filled_s: dict[int, Floats], width: int) -> list[Floats]:
        """[rows and the graph, links and channels] of each window in which something is sent."""
        count = len(self._borders)
        held: dict[tuple[int, int], Floats] = {}
        for i, row in enumerate(self._rows):
            for sent in row.sent:
                window = held.setdefault((sent.begin, sent.end), np.zeros((len(self._rows) + 1, width)))
                window[i] += filled_s[id(sent.transfer)]
        saved = np.array([[-row.saved_s] for row in self._rows] + [[0.0]])
        found = []
        for begin in range(count):
            for end in range(begin, count):
                inside = [w for (b, e), w in held.items() if b >= begin and e <= end]
                if inside:
                    whole = np.sum(inside, axis=0) + (saved if (begin, end) != (0, count - 1) else 0.0)
                    whole[-1] += self._before_s[begin] + self._behind_s[end]
                    found.append(whole)
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
