"""The event simulation, with prices given by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from autopar.cost_models.channels import Channels, Job
from autopar.cost_models.clocks import Few, Many, Streams
from autopar.cost_models.price import Price, Transfer
from autopar.cost_models.simulate import Outcome, representatives, simulate
from autopar.ops.base import Call, Operation
from autopar.ops.collectives import AllReduce
from autopar.ops.context import Context
from autopar.ops.exchanges import AllGather
from autopar.ops.gradients import Pack
from autopar.ops.updates import Update
from autopar.ops.values import Value
from autopar.ops.waits import Wait
from autopar.strategies.lowering import StepProgram
from autopar.strategies.schedule import Placed

SECOND = [0.0, 1.0, 2.0, 3.0, 4.0]
"""Four nodes of a second each."""


ALL_REDUCE, WAIT, UPDATE = AllReduce(), Wait(), Update()


def call(index: int, op: Operation, *inputs: Call, deferred: bool = False) -> Call:
    return Call(index, op, inputs, None, Value(1, "float32"), deferred=deferred)


def program(*placed: tuple[Operation, int], inputs: dict[int, int] | None = None) -> StepProgram:
    """Operations at positions; a wait waits for the collective before it, unless `inputs` says otherwise."""
    calls: list[Call] = []
    for i, (op, _) in enumerate(placed):
        calls.append(call(i, op, *(calls[j] for j in ((inputs or {}).get(i, i - 1),) if j >= 0)))
    made = tuple(Placed(c, position) for c, (_, position) in zip(calls, placed, strict=True))
    return StepProgram(Context(2), (), tuple(calls), made)


def run(step: StepProgram, prices: list[Price], prefix: list[list[float]] | None = None) -> Outcome:
    streams = Streams(prefix or [SECOND], [0, 0] if prefix is None else list(range(len(prefix))), 2)
    return simulate(step, prices, streams, "gloo", timeline=True)


def local(seconds: float) -> Price:
    return Price(np.full(2, seconds))


def transfer(seconds: float, taken: float = 0.0, core_wait_s: float = 0.0) -> Price:
    return Price(np.zeros(2), Transfer(seconds, (taken, taken) if taken else (), core_wait_s=core_wait_s))


NOTHING = local(0.0)


def test_compute_hides_a_short_transfer() -> None:
    outcome = run(program((ALL_REDUCE, 1), (WAIT, 3)), [transfer(2.0), NOTHING])
    assert outcome.step_time_s == pytest.approx(4.0)
    assert outcome.compute_s == pytest.approx(4.0)
    assert outcome.communication_s == pytest.approx(2.0)


def test_what_compute_does_not_hide_is_waited_for() -> None:
    outcome = run(program((ALL_REDUCE, 1), (WAIT, 3), (UPDATE, 3)), [transfer(5.0), NOTHING, local(0.5)])
    assert outcome.step_time_s == pytest.approx(2 + 5 + 0.5)
    assert outcome.compute_s == pytest.approx(4.5)


def test_transfers_follow_one_another() -> None:
    step = program((ALL_REDUCE, 0), (ALL_REDUCE, 1), (WAIT, 3), (WAIT, 3), inputs={2: 0, 3: 1})
    outcome = run(step, [transfer(4.0), transfer(4.0), NOTHING, NOTHING])
    # The first is issued at 1 s; the second, issued at 2 s, starts when the first has ended.
    assert [(s.start_s, s.stop_s) for s in outcome.spans if s.lane == "gloo"] == [(1.0, 5.0), (5.0, 9.0)]
    assert outcome.step_time_s == pytest.approx(9.0)


def test_a_transfer_starts_with_the_last_rank_and_the_slowest_rank_decides() -> None:
    outcome = run(program((ALL_REDUCE, 1), (WAIT, 3)), [transfer(1.0), NOTHING], prefix=[SECOND, [0, 3, 6, 9, 12]])
    assert outcome.slowest_rank == 1
    assert outcome.step_time_s == pytest.approx(12.0)
    assert [s.start_s for s in outcome.spans if s.lane == "gloo"] == [6.0]


def test_compute_beside_a_transfer_runs_slower() -> None:
    """From 2 s to 6 s the transfer takes half the processor: the last 2 s of compute take 4 s."""
    outcome = run(program((ALL_REDUCE, 1), (WAIT, 3)), [transfer(4.0, taken=0.5), NOTHING])
    assert outcome.step_time_s == pytest.approx(6.0)
    # A shorter one slows down only what is beside it.
    outcome = run(program((ALL_REDUCE, 1), (WAIT, 3)), [transfer(1.0, taken=0.5), NOTHING])
    assert outcome.step_time_s == pytest.approx(4.5)


def test_a_transfer_that_takes_all_leaves_no_overlap() -> None:
    outcome = run(program((ALL_REDUCE, 1), (WAIT, 3)), [transfer(3.0, taken=1.0), NOTHING])
    assert outcome.step_time_s == pytest.approx(4.0 + 3.0)


@pytest.mark.parametrize("timeline", [False, True])
def test_a_transfer_waits_for_cores_as_long_as_ranks_compute(timeline: bool) -> None:
    """The first, from 1 s, takes 2.5 s; of the second a fifth has gone by 4 s, when ranks have computed all; then there
    are 1.6 s left of it, and 2 s of the third."""
    step = program(
        (ALL_REDUCE, 0), (ALL_REDUCE, 1), (ALL_REDUCE, 3), (WAIT, 3), (WAIT, 3), (WAIT, 3), inputs={3: 0, 4: 1, 5: 2}
    )
    prices = [transfer(2.0, core_wait_s=0.5)] * 3 + [NOTHING] * 3
    outcome = simulate(step, prices, Streams([SECOND], [0, 0], 2), "gloo", timeline=timeline)
    assert outcome.step_time_s == pytest.approx(4 + 1.6 + 2)
    assert outcome.compute_s == pytest.approx(4.0)


def test_a_transfer_waits_for_cores_again_where_ranks_compute_again() -> None:
    """Ranks compute until 2 s, wait for the first transfer until 3 s, compute until 4 s, and wait for the second."""
    first = Price(np.zeros(2), Transfer(2.0, channel=0))
    second = Price(np.zeros(2), Transfer(4.0, channel=1, core_wait_s=4.0))
    step = program((ALL_REDUCE, 0), (ALL_REDUCE, 0), (WAIT, 1), (WAIT, 2), inputs={2: 0, 3: 1})
    outcome = simulate(step, [first, second, NOTHING, NOTHING], Streams([SECOND], [0, 0], 2), "gloo")
    # Of the second, an eighth has gone by 2 s, another quarter by 3 s, another eighth by 4 s; the rest takes 2 s.
    assert outcome.step_time_s == pytest.approx(4 + 2 + 1)


def test_spans_of_a_lane_do_not_overlap_and_end_with_the_step() -> None:
    step = program((Pack("float32"), 1), (ALL_REDUCE, 1), (WAIT, 3), (UPDATE, 3))
    outcome = run(step, [local(0.25), transfer(1.5), NOTHING, local(0.5)])
    for lane in {s.lane for s in outcome.spans}:
        mine = sorted((s.start_s, s.stop_s) for s in outcome.spans if s.lane == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
    assert max(s.stop_s for s in outcome.spans) == pytest.approx(outcome.step_time_s)
    assert [s.name for s in outcome.spans if s.lane == "rank 0"] == [
        "forward", "pack step", "backward", "update step"
    ]  # fmt: skip


def test_ranks_that_do_the_same_are_simulated_once() -> None:
    same, owner = Price(np.ones(4)), Price(np.array([1.0, 0.0, 0.0, 0.0]), uniform=False)
    assert representatives([same], [0, 0, 0, 0]) == [0]
    assert representatives([same, owner], [0, 0, 0, 0]) == [0, 1]
    assert representatives([same, owner], [0, 0, 1, 0]) == [0, 1, 2]


def test_what_the_next_step_receives_is_hidden_by_its_forward_pass() -> None:
    """Of 3 s behind the backward pass, the next step's first node, before the wait, hides 1 s."""
    begun = call(1, AllGather(), deferred=True)
    wait = call(0, WAIT, begun, deferred=True)
    placed = (Placed(wait, 0), Placed(begun, 3))
    context = Context(2, late_parameters=True)
    step = StepProgram(context, (), (wait, begun), placed)
    prices = [local(0.25), transfer(3.0)]
    outcome = run(step, prices)
    assert outcome.step_time_s == pytest.approx(3 + 0.25 + 3)
    assert outcome.compute_s == pytest.approx(4.25)
    assert outcome.communication_s == pytest.approx(3.0)
    assert [(s.start_s, s.stop_s) for s in outcome.spans if s.lane == "gloo"] == [(0.0, 3.0)]
    # With all of the forward pass in front of the wait, another second.
    again = StepProgram(context, (), step.calls, (Placed(wait, 1), placed[1]))
    assert run(again, prices).step_time_s == pytest.approx(2 + 0.25 + 3)


@pytest.mark.parametrize("seed", range(20))
def test_many_ranks_at_once_are_simulated_as_one_after_the_other(seed: int) -> None:
    """Random work beside random transfers, some of which take all of a rank's compute."""
    draw = np.random.default_rng(seed)
    ranks, calls = 7, 12
    streams = Streams([SECOND, [2.5 * s for s in SECOND]], draw.integers(0, 2, ranks).tolist(), backward_start=2)
    own_s = draw.random((calls, ranks)) * draw.integers(0, 2, (calls, 1))
    prices = [Price(row, uniform=False) for row in own_s]
    transfers = [
        Transfer(
            float(draw.random()),
            tuple(draw.choice([0.0, 0.3, 1.0], ranks).tolist()),
            channel=int(draw.integers(2)),
            core_wait_s=float(draw.choice([0.0, 0.2])),
        )
        for _ in range(calls)
    ]

    def simulated(kind: type[Few] | type[Many]) -> list[tuple[float, ...]]:
        channels = Channels()
        clocks = kind(range(ranks), streams, prices, channels)
        found = []
        for i, transfer in enumerate(transfers):
            nodes = 1 + i * 3 // calls
            clocks.run(nodes, i + 1)
            channels.issue(Job(i, transfer.channel, clocks.latest_s, transfer))
            if i % 3 == 2:
                clocks.wait(channels.end_of(i - 1))
            found += [tuple(clocks.now), tuple(clocks.done_s)]
        clocks.begin_step()
        clocks.run(4, calls)
        return [*found, tuple(clocks.now)]

    assert simulated(Many) == simulated(Few)
