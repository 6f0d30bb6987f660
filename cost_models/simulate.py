"""Event simulation of one step: compute streams of the ranks, and communication channels beside them.

What is modelled: each rank runs its part of the program in order on one compute stream. A collective starts when the
last rank has issued it and its channel is free, for a backend begins the collectives of one process group in the
order of submission, and runs one of them, or as many as it has threads; those of other groups run beside it and share
the links with it; a wait blocks the compute stream. While a collective runs, compute beside it may be slowed down,
since the backend takes processor time from it; and the collective itself is slower where its threads wait for cores
that compute, until all ranks wait. The slowest rank decides the step. Where a step leaves transfers to the next one,
several are run, and the last is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_models.alike import alike
from autopar.cost_models.base import Span
from autopar.cost_models.channels import Channels, Job
from autopar.cost_models.clocks import Streams, clocks_of
from autopar.cost_models.price import Price, Transfer
from autopar.ops.base import Call
from autopar.strategies.lowering import StepProgram

STEADY_STEPS = 3
"""Steps that are simulated where steps overlap, of which the last is taken: the first has nothing to wait for, and
sends less beside its backward pass than those behind it."""
ROUNDED = 1e-12
"""Fraction of the simulated time within which ranks count as done together; the first of them is taken for the
slowest."""


@dataclass
class Outcome:
    """A simulated step."""

    step_time_s: float
    compute_s: float
    """Seconds of compute on the slowest rank."""
    communication_s: float
    slowest_rank: int
    spans: list[Span] = field(default_factory=list)


def simulate(
    program: StepProgram, prices: Sequence[Price], streams: Streams, channel: str, *, timeline: bool = False
) -> Outcome:
    """Runs the placed calls; `prices[i]` is the price of `program.calls[i]`. Deterministic."""
    ranks = representatives(prices, streams.device_of_rank)
    of_placed = [prices[i] for i in program.order]
    state = _State(ranks, streams, of_placed, channel, timeline)
    overlap = program.context.late_parameters and any(c.deferred for c in program.calls)
    for _ in range(STEADY_STEPS if overlap else 1):
        state.begin_step()
        for i, (call, position) in enumerate(program.placed):
            if timeline:
                state.run_graph(position + 1, i)
            begun = call.op.waits_for(call)
            if begun is not None:
                state.wait_for(begun, int(call.deferred), position + 1, i)
            if timeline:
                state.run(position + 1, i + 1, label(call))
            transfer = of_placed[i].transfer
            if transfer is not None:
                state.issue(call, transfer, position + 1, i + 1)
                if not call.op.is_collective:
                    state.wait_for(call, 0, position + 1, i + 1)
        state.run_graph(len(streams.prefix_s[0]) - 1, len(of_placed))
    slowest = int(np.argmax(np.array(state.clocks.now) >= state.latest_s * (1 - ROUNDED)))
    return Outcome(
        step_time_s=float(state.clocks.now[slowest]) - state.began_s,
        compute_s=float(state.clocks.done_s[slowest]),
        communication_s=state.sent_s(),
        slowest_rank=ranks[slowest],
        spans=state.timeline_spans(),
    )


def representatives(prices: Sequence[Price], device_of_rank: Sequence[int]) -> list[int]:
    """One rank for each set of ranks whose device and prices are all equal: the others would do the same."""
    unequal = list({id(p): p for p in prices if not p.uniform}.values())
    taken = [p.transfer.taken for p in unequal if p.transfer and p.transfer.taken]
    rows = [np.array(device_of_rank), *(p.device_s for p in unequal), *map(np.array, taken)]
    return [int(rank) for rank in alike(rows, len(device_of_rank))[0]]


class _State:
    """How far the step is. Lists are indexed by representative, not by rank."""

    def __init__(
        self, ranks: list[int], streams: Streams, prices: Sequence[Price], channel: str, timeline: bool
    ) -> None:
        """`prices`: of the placed calls, in their order."""
        self.ranks = ranks
        self.channel = channel
        self.timeline = timeline
        self.step = -1
        self.calls = len(prices)
        self.began_s = 0.0
        self.sent_before_s = 0.0
        self.spans: list[Span] = []
        self.backward_start = streams.backward_start
        self.nodes = 0
        """Of the graph, as far as the timeline was drawn."""
        self.channels = Channels()
        self.clocks = clocks_of(ranks, streams, prices, self.channels)
        self.labels: dict[int, str] = {}
        self.waits_for_cores = any(p.transfer.core_wait_s for p in prices if p.transfer)
        """Whether some transfer is slower while ranks compute."""

    def begin_step(self) -> None:
        """The next step; what is late of the one before is still in flight."""
        self.step += 1
        self.nodes = 0
        self.began_s = self.latest_s
        self.sent_before_s = self.channels.busy_s(self.began_s)
        self.clocks.begin_step()
        self.spans.clear()

    @property
    def latest_s(self) -> float:
        """When the last rank has done what it was given so far."""
        return self.clocks.latest_s

    def number(self, call: Call, steps_ago: int = 0) -> int:
        """Of a call's transfer: each step has its own."""
        return call.index + self.calls * (self.step - steps_ago)

    def sent_s(self) -> float:
        """How long something was in flight during the step."""
        if self.step == 0:
            self.channels.finish()
        return self.channels.busy_s(self.latest_s) - self.sent_before_s

    def run(self, nodes: int, placed: int, name: str = "") -> None:
        """Advances each compute stream, as `Clocks.run` does. `name`: of the bar that the timeline shows for it."""
        before = [*self.clocks.now] if self.timeline else []
        self.clocks.run(nodes, placed)
        for rank, begin, end in zip(self.ranks, before, self.clocks.now, strict=False):
            if end > begin:
                self.spans.append(Span(f"rank {rank}", name, float(begin), float(end)))

    def run_graph(self, nodes: int, placed: int) -> None:
        """The same, of the graph's nodes alone."""
        if self.nodes < self.backward_start < nodes:
            self.run(self.backward_start, placed, "forward")
        self.run(nodes, placed, "forward" if nodes <= self.backward_start else "backward")
        self.nodes = nodes

    def issue(self, call: Call, transfer: Transfer, nodes: int, placed: int) -> None:
        """Puts a transfer into its channel, once so much has run: it starts behind those before it, when the last rank
        has issued it."""
        self.clocks.run(nodes, placed)
        number = self.number(call)
        self.channels.issue(Job(number, (transfer.channel, transfer.at_once), self.clocks.latest_s, transfer))
        if self.timeline:
            self.labels[number] = label(call)

    def timeline_spans(self) -> list[Span]:
        """All bars: those of compute, and those of each channel, which is named where there are several."""
        if not self.timeline:
            return []
        self.channels.finish()
        names: dict[Hashable, str] = {}
        ended_s = self.latest_s
        for job, end in self.channels.done:
            start, end = max(job.start_s or 0.0, self.began_s), min(end, ended_s)
            if start < end or self.step == 0:
                name = names.setdefault(job.channel, f"{self.channel} {len(names) + 1}" if names else self.channel)
                self.spans.append(Span(name, self.labels[job.index], start, end))
        return [s._replace(start_s=s.start_s - self.began_s, stop_s=s.stop_s - self.began_s) for s in self.spans]

    def wait_for(self, call: Call, steps_ago: int, nodes: int, placed: int) -> None:
        """Blocks every compute stream, once its first `nodes` nodes and `placed` placed calls have run, until the
        transfer has ended that a call has begun `steps_ago` steps ago; does nothing where there was no such step."""
        if steps_ago > self.step:
            return
        number = self.number(call, steps_ago)
        if self.waits_for_cores:
            self.clocks.run(nodes, placed)
            if number not in self.channels.ends:
                self.channels.compute(False, self.clocks.latest_s)
        end = self.channels.end_of(number)
        if self.clocks.earliest_s < end:
            self.clocks.run(nodes, placed)
            self.clocks.wait(end)
        if self.waits_for_cores:
            self.channels.compute(True, end)


def label(call: Call) -> str:
    """The name of a call in the timeline."""
    where = "step" if call.group is None else f"group {call.group.index}"
    return f"{call.op.name} {where}"
