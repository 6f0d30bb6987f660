"""Transfers beside one another: order within a channel, links shared between channels."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.cost_models.channels import CROWDED, Channels, Job
from autopar.cost_models.price import Transfer


def _job(index: int, channel: str, ready: float, seconds: float, loads: tuple[float, ...], at_once: int = 1) -> Job:
    return Job(index, channel, ready, Transfer(seconds, loads=np.array(loads), at_once=at_once))


def test_a_channel_finishes_in_order() -> None:
    channels = Channels()
    channels.issue(_job(0, "a", 0.0, 2.0, (1.0,)))
    channels.issue(_job(1, "a", 1.0, 3.0, (1.0,)))
    assert channels.end_of(1) == pytest.approx(5.0)
    assert channels.ends[0] == pytest.approx(2.0)


def test_a_channel_of_several_threads_begins_in_order_and_runs_as_many_at_once() -> None:
    channels = Channels()
    for index, seconds in enumerate((4.0, 1.0, 2.0)):
        channels.issue(_job(index, "a", 0.0, seconds, (0.5,), at_once=2))
    # The third begins when the second has ended; no link is full.
    assert channels.end_of(0) == pytest.approx(4.0)
    assert channels.ends[1] == pytest.approx(1.0)
    assert channels.end_of(2) == pytest.approx(3.0)


def test_channels_on_different_links_do_not_disturb_each_other() -> None:
    channels = Channels()
    channels.issue(_job(0, "a", 0.0, 2.0, (1.0, 0.0)))
    channels.issue(_job(1, "b", 0.0, 3.0, (0.0, 1.0)))
    assert channels.end_of(0) == pytest.approx(2.0)
    assert channels.end_of(1) == pytest.approx(3.0)
    assert channels.busy_s(3.0) == pytest.approx(3.0)


def test_channels_share_a_link_that_both_fill() -> None:
    channels = Channels()
    channels.issue(_job(0, "a", 0.0, 2.0, (1.0,)))
    channels.issue(_job(1, "b", 1.0, 2.0, (1.0,)))
    # One second alone, then half of the link each: the first needs two more, the second has one left, alone.
    assert channels.end_of(0) == pytest.approx(3.0)
    assert channels.end_of(1) == pytest.approx(4.0)


def test_a_ring_of_our_own_beside_one_of_the_library_leaves_a_full_link_idle_at_times() -> None:
    def end(at_once: tuple[int, int], load: float, in_turn: bool = True) -> float:
        channels = Channels()
        for i, threads in enumerate(at_once):
            transfer = Transfer(2.0, loads=np.array([load]), at_once=threads, in_turn=in_turn)
            channels.issue(Job(i, f"channel {i}", 0.0, transfer))
        return max(channels.end_of(0), channels.end_of(1))

    assert end((1, 2), 1.0) == pytest.approx(4.0 * CROWDED)
    assert end((2, 2), 1.0) == pytest.approx(4.0)
    assert end((1, 2), 1.0, in_turn=False) == pytest.approx(4.0), "between two ranks nothing is passed on"
    assert end((1, 2), 0.5) == pytest.approx(2.0), "there is room for both"


def test_transfers_wait_for_each_other_on_the_one_connection_of_their_channel() -> None:
    def ends(loads: Sequence[tuple[float, ...]], channel_of: str, connection: float) -> list[float]:
        channels = Channels()
        for index, (load, channel) in enumerate(zip(loads, channel_of, strict=True)):
            transfer = Transfer(2.0, loads=np.array(load), at_once=2, connection=connection, channel=channel)
            channels.issue(Job(index, channel, 0.0, transfer))
        channels.finish()
        return [channels.ends[i] for i in range(len(loads))]

    opposite = [(1.0, 0.0), (0.0, 1.0)]
    assert ends(opposite, "aa", 0.0) == pytest.approx([2.0, 2.0])
    assert ends(opposite, "aa", 1.0) == pytest.approx([4.0, 4.0])
    assert ends(opposite, "aa", 0.75) == pytest.approx([3.0, 3.0])
    assert ends(opposite, "ab", 1.0) == pytest.approx([2.0, 2.0])
    assert ends([(1.0, 0.0)] * 2, "aa", 1.0) == pytest.approx([4.0, 4.0])


def test_the_last_rounding_of_a_long_step_is_not_waited_for() -> None:
    """Hours into a step, what rounding leaves of a transfer is less than the clock can tell."""
    channels, draw, ready = Channels(), random.Random(0), 1e6
    for index in range(40):
        ready += 3 * draw.random()
        channels.issue(_job(index, "abc"[index % 3], ready, 10 * draw.random(), (draw.random(), draw.random())))
    for _ in range(80):  # each begins, and ends
        if channels.next_s < float("inf"):
            channels.step()
    assert len(channels.ends) == 40


def test_what_is_issued_later_does_not_change_what_has_passed() -> None:
    channels = Channels()
    channels.issue(_job(0, "a", 0.0, 2.0, (1.0,)))
    assert channels.busy_s(1.5) == pytest.approx(1.5)
    channels.issue(_job(1, "b", 1.5, 1.0, (1.0,)))
    assert channels.end_of(0) == pytest.approx(2.5)
    assert channels.end_of(1) == pytest.approx(3.0)
