"""The event simulation, with prices given by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from autopar.cost_models.price import Price, Transfer
from autopar.cost_models.simulate import Outcome, Streams, representatives, simulate
from autopar.ir.primitives import Kind, Primitive
from autopar.strategies import Context
from autopar.strategies.lowering import Placed, StepProgram

SECOND = [0.0, 1.0, 2.0, 3.0, 4.0]
"""Four nodes of a second each."""


def program(*placed: tuple[Kind, int], inputs: dict[int, int] | None = None) -> StepProgram:
    """Primitives at positions; a wait waits for the collective before it, unless `inputs` says otherwise."""
    made = []
    for i, (kind, position) in enumerate(placed):
        source = (inputs or {}).get(i, i - 1)
        made.append(Placed(Primitive(i, kind, i, (source,) if i else (), 1, "float32", 0), position))
    return StepProgram(Context(2), (), tuple(p.primitive for p in made), tuple(made))


def run(step: StepProgram, prices: list[Price], prefix: list[list[float]] | None = None) -> Outcome:
    streams = Streams(prefix or [SECOND], [0, 0] if prefix is None else list(range(len(prefix))), 2)
    return simulate(step, prices, streams, "gloo", timeline=True)


def local(seconds: float) -> Price:
    return Price((seconds, seconds))


def transfer(seconds: float, taken: float = 0.0) -> Price:
    return Price((0.0, 0.0), Transfer(seconds, (taken, taken) if taken else ()))


NOTHING = local(0.0)


def test_compute_hides_a_short_transfer() -> None:
    outcome = run(program((Kind.ALL_REDUCE, 1), (Kind.WAIT, 3)), [transfer(2.0), NOTHING])
    assert outcome.step_time_s == pytest.approx(4.0)
    assert outcome.compute_s == pytest.approx(4.0)
    assert outcome.communication_s == pytest.approx(2.0)


def test_what_compute_does_not_hide_is_waited_for() -> None:
    outcome = run(program((Kind.ALL_REDUCE, 1), (Kind.WAIT, 3), (Kind.UPDATE, 3)), [transfer(5.0), NOTHING, local(0.5)])
    assert outcome.step_time_s == pytest.approx(2 + 5 + 0.5)
    assert outcome.compute_s == pytest.approx(4.5)


def test_transfers_follow_one_another() -> None:
    step = program((Kind.ALL_REDUCE, 0), (Kind.ALL_REDUCE, 1), (Kind.WAIT, 3), (Kind.WAIT, 3), inputs={2: 0, 3: 1})
    outcome = run(step, [transfer(4.0), transfer(4.0), NOTHING, NOTHING])
    # The first is issued at 1 s; the second, issued at 2 s, starts when the first has ended.
    assert [(s.start_s, s.stop_s) for s in outcome.spans if s.lane == "gloo"] == [(1.0, 5.0), (5.0, 9.0)]
    assert outcome.step_time_s == pytest.approx(9.0)


def test_a_transfer_starts_with_the_last_rank_and_the_slowest_rank_decides() -> None:
    outcome = run(
        program((Kind.ALL_REDUCE, 1), (Kind.WAIT, 3)), [transfer(1.0), NOTHING], prefix=[SECOND, [0, 3, 6, 9, 12]]
    )
    assert outcome.slowest_rank == 1
    assert outcome.step_time_s == pytest.approx(12.0)
    assert [s.start_s for s in outcome.spans if s.lane == "gloo"] == [6.0]


def test_compute_beside_a_transfer_runs_slower() -> None:
    """From 2 s to 6 s the transfer takes half the processor: the last 2 s of compute take 4 s."""
    outcome = run(program((Kind.ALL_REDUCE, 1), (Kind.WAIT, 3)), [transfer(4.0, taken=0.5), NOTHING])
    assert outcome.step_time_s == pytest.approx(6.0)
    # A shorter one slows down only what is beside it.
    outcome = run(program((Kind.ALL_REDUCE, 1), (Kind.WAIT, 3)), [transfer(1.0, taken=0.5), NOTHING])
    assert outcome.step_time_s == pytest.approx(4.5)


def test_a_transfer_that_takes_all_leaves_no_overlap() -> None:
    outcome = run(program((Kind.ALL_REDUCE, 1), (Kind.WAIT, 3)), [transfer(3.0, taken=1.0), NOTHING])
    assert outcome.step_time_s == pytest.approx(4.0 + 3.0)


def test_spans_of_a_lane_do_not_overlap_and_end_with_the_step() -> None:
    step = program((Kind.PACK, 1), (Kind.ALL_REDUCE, 1), (Kind.WAIT, 3), (Kind.UPDATE, 3))
    outcome = run(step, [local(0.25), transfer(1.5), NOTHING, local(0.5)])
    for lane in {s.lane for s in outcome.spans}:
        mine = sorted((s.start_s, s.stop_s) for s in outcome.spans if s.lane == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
    assert max(s.stop_s for s in outcome.spans) == pytest.approx(outcome.step_time_s)
    assert [s.name for s in outcome.spans if s.lane == "rank 0"] == [
        "forward", "pack group 0", "backward", "update group 3"
    ]  # fmt: skip


def test_ranks_that_do_the_same_are_simulated_once() -> None:
    same, owner = Price((1.0,) * 4), Price((1.0, 0.0, 0.0, 0.0), uniform=False)
    assert representatives([same], [0, 0, 0, 0]) == [0]
    assert representatives([same, owner], [0, 0, 0, 0]) == [0, 1]
    assert representatives([same, owner], [0, 0, 1, 0]) == [0, 1, 2]


def test_what_the_next_step_receives_is_hidden_by_its_forward_pass() -> None:
    """Of 3 s behind the backward pass, the next step's first node, before the wait, hides 1 s."""
    placed = [
        Placed(Primitive(0, Kind.WAIT, 0, (1,), 1, "float32", 1, position=0, late=True), 0),
        Placed(Primitive(1, Kind.ALL_GATHER, 0, (), 1, "float32", 1, late=True), 3),
    ]
    context = Context(2, late_parameters=True)
    step = StepProgram(context, (), tuple(p.primitive for p in placed), tuple(placed))
    prices = [local(0.25), transfer(3.0)]
    outcome = run(step, prices)
    assert outcome.step_time_s == pytest.approx(3 + 0.25 + 3)
    assert outcome.compute_s == pytest.approx(4.25)
    assert outcome.communication_s == pytest.approx(3.0)
    assert [(s.start_s, s.stop_s) for s in outcome.spans if s.lane == "gloo"] == [(0.0, 3.0)]
    # With all of the forward pass in front of the wait, another second.
    late = Placed(placed[0].primitive, 1)
    again = StepProgram(context, (), step.primitives, (late, placed[1]))
    assert run(again, prices).step_time_s == pytest.approx(2 + 0.25 + 3)
