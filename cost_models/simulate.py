"""Event simulation of one step: compute streams of the ranks, and communication channels beside them.

What is modelled: each rank runs its part of the program in order on one compute stream. A collective starts when the
last rank has issued it and its channel is free, for a backend begins the collectives of one process group in the
order of submission, and runs one of them, or as many as it has threads; those of other groups run beside it and share
the links with it; a wait blocks the compute stream. While a collective runs, compute beside it may be slowed down,
since the backend takes processor time from it. The slowest rank decides the step. Where a step leaves transfers to the
next one, several are run, and the last is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.base import Span
from autopar.cost_models.channels import Channels, Job
from autopar.ir.primitives import COLLECTIVES, WHOLE_STEP, Kind, Primitive
from autopar.strategies.lowering import StepProgram

STEADY_STEPS = 3
"""Where steps overlap, the last of so many is taken: the first has nothing to wait for, and sends less beside its
backward pass than those behind it."""


@dataclass(frozen=True, slots=True)
class Price:
    """What one primitive costs. Tuples are indexed by rank."""

    device_s: tuple[float, ...]
    """On the compute stream, before anything is sent."""
    transfer_s: float = 0.0
    """On the channel, once every rank has issued it."""
    taken: tuple[float, ...] = ()
    """Fraction of the compute stream that the transfer takes while it runs, 0 to 1; empty for none."""
    uniform: bool = True
    """Whether all ranks' entries are equal."""
    loads: tuple[float, ...] = ()
    """Part of each link, and of what hosts can move, that the transfer fills while it is alone."""
    at_once: int = 1
    """Such transfers that a channel runs at the same time; those of another number have channels of their own."""


@dataclass
class Outcome:
    """A simulated step."""

    step_time_s: float
    compute_s: float
    """On the slowest rank."""
    communication_s: float
    slowest_rank: int
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Streams:
    """The compute streams: the time of the graph's nodes, summed up, for each kind of device."""

    prefix_s: Sequence[Sequence[float]]
    """[device][i]: seconds of the first i nodes."""
    device_of_rank: Sequence[int]
    backward_start: int


def simulate(
    program: StepProgram, prices: Sequence[Price], streams: Streams, channel: str, *, timeline: bool = False
) -> Outcome:
    """Runs the placed primitives, `prices[i]` the price of `program.placed[i]`. Deterministic."""
    ranks = representatives(prices, streams.device_of_rank)
    state = _State(ranks, streams, channel, len(program.primitives), timeline)
    wait = Kind.WAIT  # looking a member of an enumeration up takes longer than what is done with it here
    for _ in range(STEADY_STEPS if any(p.primitive.late for p in program.placed) else 1):
        state.begin_step()
        for placed, price in zip(program.placed, prices, strict=True):
            if placed.position >= state.done:
                state.compute_until(placed.position)
            primitive = placed.primitive
            kind = primitive.kind
            if kind is wait:
                state.wait(primitive)
            if price.device_s:
                state.work(primitive, price)
            if kind in COLLECTIVES:
                state.issue(primitive, price)
            elif price.transfer_s:
                state.issue(primitive, price)
                state.wait_for(state.channels.end_of(state.number(primitive.index)))
        state.compute_until(len(streams.prefix_s[0]) - 2)
        state.settle()
    slowest = max(range(len(ranks)), key=state.now.__getitem__)
    return Outcome(
        step_time_s=state.now[slowest] - state.began_s,
        compute_s=state.busy[slowest],
        communication_s=state.sent_s(),
        slowest_rank=ranks[slowest],
        spans=state.timeline_spans(),
    )


def representatives(prices: Sequence[Price], device_of_rank: Sequence[int]) -> list[int]:
    """One rank for each set of ranks whose device and prices are all equal: the others would do the same."""
    unequal = [p for p in prices if not p.uniform]
    first: dict[tuple[float, ...], int] = {}
    for rank, device in enumerate(device_of_rank):
        signature = (device, *(p.device_s[rank] for p in unequal), *(p.taken[rank] for p in unequal if p.taken))
        first.setdefault(signature, rank)
    return sorted(first.values())


class _State:
    """The clocks. Lists are indexed by representative, not by rank."""

    def __init__(self, ranks: list[int], streams: Streams, channel: str, primitives: int, timeline: bool) -> None:
        self.ranks = ranks
        self.channel = channel
        self.primitives = primitives
        self.timeline = timeline
        self.step = -1
        self.began_s = 0.0
        self.sent_before_s = 0.0
        self.spans: list[Span] = []
        self.prefix = [streams.prefix_s[streams.device_of_rank[r]] for r in ranks]
        self.backward_start = streams.backward_start
        self.done = 0
        """Nodes of the graph that have run."""
        self.now = [0.0] * len(ranks)
        self.ahead_s = [0.0] * len(ranks)
        """Work that was handed to each stream, of which it is not yet known how long it takes."""
        self.busy = [0.0] * len(ranks)
        self.channels = Channels()
        self.stretch = [0] * len(ranks)
        """For each, the first stretch of slowed compute that may still lie ahead."""
        self.labels: dict[int, str] = {}

    def begin_step(self) -> None:
        """The next step; what is late of the one before is still in flight."""
        self.step += 1
        self.done = 0
        self.began_s = max(self.now)
        self.sent_before_s = self.channels.busy_s(self.began_s)
        self.busy = [0.0] * len(self.ranks)
        self.spans.clear()

    def number(self, primitive: int, steps_ago: int = 0) -> int:
        """Of a transfer, by the index of its primitive: each step has its own."""
        return primitive + self.primitives * (self.step - steps_ago)

    def sent_s(self) -> float:
        """How long something was in flight during the step."""
        if self.step == 0:
            self.channels.finish()
        return self.channels.busy_s(max(self.now)) - self.sent_before_s

    def compute_until(self, position: int) -> None:
        """Runs the graph's nodes up to and including `position`."""
        stop = position + 1
        if stop <= self.done:
            return
        cuts = [stop]
        if self.timeline and self.done < self.backward_start < stop:
            cuts = [self.backward_start, stop]
        for cut in cuts:
            for i, prefix in enumerate(self.prefix):
                seconds = prefix[cut] - prefix[self.done]
                if seconds > 0.0:
                    self._run(i, seconds, "forward" if cut <= self.backward_start else "backward")
            self.done = cut

    def work(self, primitive: Primitive, price: Price) -> None:
        """Runs what a primitive does on the device."""
        device_s = price.device_s
        if self.timeline:
            name = label(primitive)
            for i, rank in enumerate(self.ranks):
                if device_s[rank] > 0.0:
                    self._run(i, device_s[rank], name)
            return
        for i, rank in enumerate(self.ranks):
            self.busy[i] += device_s[rank]
            self.ahead_s[i] += device_s[rank]

    def issue(self, primitive: Primitive, price: Price) -> None:
        """Puts a transfer into its channel: it starts behind those before it, once the last rank has issued it."""
        self.settle()
        taken = tuple(price.taken[r] for r in self.ranks) if price.taken else ()
        channel = (primitive.teams, primitive.lane, price.at_once, bool(primitive.summed_by))
        number = self.number(primitive.index)
        self.channels.issue(Job(number, channel, max(self.now), price.transfer_s, price.loads, taken, price.at_once))
        if self.timeline:
            self.labels[number] = label(primitive)

    def timeline_spans(self) -> list[Span]:
        """All bars: those of compute, and those of each channel, which is named where there are several."""
        if not self.timeline:
            return []
        self.channels.finish()
        names: dict[Hashable, str] = {}
        ended_s = max(self.now)
        for job, end in self.channels.done:
            start, end = max(job.start_s or 0.0, self.began_s), min(end, ended_s)
            if start < end or self.step == 0:
                name = names.setdefault(job.channel, f"{self.channel} {len(names) + 1}" if names else self.channel)
                self.spans.append(Span(name, self.labels[job.index], start, end))
        return [s._replace(start_s=s.start_s - self.began_s, stop_s=s.stop_s - self.began_s) for s in self.spans]

    def wait(self, primitive: Primitive) -> None:
        """Blocks every compute stream until the collective that the primitive waits for has ended."""
        if self.step or not primitive.late:
            self.wait_for(self.channels.end_of(self.number(primitive.inputs[0], steps_ago=int(primitive.late))))

    def wait_for(self, end: float) -> None:
        self.settle()
        self.now = [max(t, end) for t in self.now]

    def _run(self, i: int, seconds: float, name: str) -> None:
        """Advances one compute stream by `seconds` of work, longer where transfers take their part."""
        self.busy[i] += seconds
        self.ahead_s[i] += seconds
        if self.timeline:
            begin = self.now[i]
            self.settle()
            self.spans.append(Span(f"rank {self.ranks[i]}", name, begin, self.now[i]))

    def settle(self) -> None:
        """Does what was handed to the streams: what follows depends on when they are done."""
        for i, seconds in enumerate(self.ahead_s):
            if seconds > 0.0:
                self.now[i] = self._slowed(i, self.now[i], seconds)
                self.ahead_s[i] = 0.0

    def _slowed(self, i: int, now: float, seconds: float) -> float:
        """When work is done that would take `seconds` alone."""
        channels = self.channels
        stretches = channels.slowed
        while True:
            while self.stretch[i] < len(stretches):
                start, end, taken = stretches[self.stretch[i]]
                if now < end:
                    if now + seconds <= start:
                        return now + seconds
                    if now < start:
                        seconds -= start - now
                        now = start
                    speed = 1.0 - taken[i]
                    if speed > 0.0 and (end - now) * speed >= seconds:
                        return now + seconds / speed
                    seconds -= (end - now) * speed
                    now = end
                self.stretch[i] += 1
            if now < channels.now_s:  # nothing was taken since
                if now + seconds <= channels.now_s:
                    return now + seconds
                seconds -= channels.now_s - now
                now = channels.now_s
            if now < channels.next_s:
                speed = 1.0 - channels.taken[i] if channels.taken else 1.0
                if speed > 0.0 and now + seconds / speed <= channels.next_s:
                    return now + seconds / speed
            channels.step()


def label(primitive: Primitive) -> str:
    """How the timeline names a primitive."""
    where = "step" if primitive.group == WHOLE_STEP else f"group {primitive.group}"
    return f"{primitive.kind.value} {where}"
