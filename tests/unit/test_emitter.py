"""What the emitter lets through, and what it does not."""

from __future__ import annotations

import pytest

from autopar.ops.base import Call
from autopar.ops.collectives import AllReduce, wire_bytes
from autopar.ops.group import Group, Member
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies import Context, strategy_named
from autopar.strategies.emitter import Emitter
from tests.unit.synthetic import training_graph


def _packed(world_size: int) -> tuple[Emitter, Group, Call]:
    graph = training_graph([("w", (4, 6))])
    piece = ParameterSlice(name="w")
    group = Group(0, SyncGroup(strategy="all_reduce", members=(piece,)), (Member(piece, graph.by_name["w"]),))
    emit = Emitter(Context(world_size))
    return emit, group, emit.pack(group)


def test_no_rank_is_counted_twice() -> None:
    emit, _, packed = _packed(4)
    within = emit.wait(emit.all_reduce(packed, ((0, 1), (2, 3))))
    with pytest.raises(AssertionError, match="twice"):
        emit.all_reduce(within, ((0, 1), (2, 3)))


def test_an_update_needs_the_sum_over_all_ranks() -> None:
    emit, group, packed = _packed(4)
    within = emit.wait(emit.all_reduce(packed, ((0, 1), (2, 3))))
    with pytest.raises(AssertionError, match="summed over all ranks"):
        emit.update(within, group)
    emit.update(emit.wait(emit.all_reduce(within, ((0, 2), (1, 3)))), group)


def test_levels_halve_what_crosses_the_hosts() -> None:
    emit, group, _ = _packed(4)
    emit.calls.clear()
    emit.context = Context(4, hosts=(0, 0, 1, 1))
    strategy = strategy_named("hierarchical_all_reduce")
    strategy.lower(group, strategy.options(emit.context)[0], emit)
    across = next(c for c in emit.calls if isinstance(c.op, AllReduce))
    assert across.op == AllReduce(((0, 2), (1, 3)))
    elements = 24
    assert wire_bytes(across, 4)[0] == [elements // 2 * 4] * 4  # 2 (h-1)/h of half of the bucket, for each of two ranks


def test_unequal_hosts_are_summed_in_one_ring() -> None:
    emit, group, _ = _packed(3)
    emit.calls.clear()
    emit.context = Context(3, hosts=(0, 0, 1))
    strategy = strategy_named("hierarchical_all_reduce")
    strategy.lower(group, strategy.options_type(), emit)
    assert [c.op.name for c in emit.calls] == ["pack", "all_reduce", "wait", "update"]
