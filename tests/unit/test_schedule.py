"""The scheduler: where calls go that say only what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.layouts import VARYING, Shard
from autopar.ops.values import Value
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies.emitter import Emitter
from autopar.strategies.lowering import StepProgram, lower_plan, resolve
from autopar.strategies.schedule import Placed, schedule
from tests.unit.synthetic import training_graph

N = 4
LAYERS = [(name, (8, 8)) for name in "abc"]
GRAPH = training_graph(LAYERS)
"""Nodes 0 to 2 are the forward pass; gradients are complete at 4 (c), 6 (b) and 8 (a), the last node."""
START, END = GRAPH.backward_start - 1, len(GRAPH.compute) - 1
READY = {p.name: p.ready for p in GRAPH.parameters}


@dataclass(frozen=True, slots=True)
class Read(Operation):
    """Reads the graph behind a position, which makes it a part of each rank's own."""

    name = "read"
    at: int = -1

    def behind(self, group: Group) -> int:
        return self.at

    def value(self, at: Emission) -> Value:
        return Value(N, "float32", Shard((1,) * N))

    def write(self, site: Site, call: Call) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Hand(Read):
    """Hands a value over to the graph, which reads it behind a position."""

    name = "hand"
    until: int = 0

    def needed(self, group: Group) -> int:
        return self.until

    def value(self, at: Emission) -> Value:
        return Value(1, "float32", VARYING)


@dataclass(frozen=True, slots=True)
class Unsaid(Read):
    """Says nothing of what it reads."""

    name = "unsaid"

    def behind(self, group: Group) -> int:
        return Operation.behind(self, group)


def emitter(**context: Any) -> tuple[Emitter, list[Group]]:
    groups = [SyncGroup(strategy="all_reduce", members=(ParameterSlice(name=n),)) for n in "cba"]
    return Emitter(Context(N, **context), START, END), [resolve(i, g, GRAPH) for i, g in enumerate(groups)]


def placed(emit: Emitter) -> list[Placed]:
    return schedule(emit.finish(), GRAPH, emit.context)


def names(found: Sequence[Placed], position: int) -> list[str]:
    return [
        p.call.op.name + ("" if p.call.group is None else f" {p.call.group.index}")
        for p in found
        if p.position == position
    ]


def lowered(strategies: dict[str, tuple[str, dict[str, Any]]], **context: Any) -> StepProgram:
    """A group for each parameter, in the order given."""
    specs = [
        SyncGroup(strategy=strategy, members=(ParameterSlice(name=name),), options=options)
        for name, (strategy, options) in strategies.items()
    ]
    return lower_plan(specs, GRAPH, Context(**{"world_size": N, **context}))


def test_sums_keep_the_order_of_groups() -> None:
    """The gradient of c is complete first, but its sum goes behind that of b."""
    program = lowered({n: ("all_reduce", {}) for n in "bca"})
    sums = [p for p in program.placed if p.call.group is not None and p.call.op.is_collective]
    assert [(p.call.owner_group.names[0], p.position) for p in sums] == [("b", 6), ("c", 6), ("a", 8)]


def test_behind_the_backward_pass_groups_take_turns() -> None:
    program = lowered({n: ("hierarchical_all_reduce", {"inner": 2}) for n in "ca"})
    assert names(program.placed, END)[2:-1] == [  # less what is begun of the last group, and the wait for the loss
        *("wait 0", "all_reduce 0", "wait 1", "all_reduce 1"),
        *("wait 0", "all_gather 0", "wait 1", "all_gather 1"),
        *("wait 0", "update 0", "wait 1", "update 1"),
    ]


def test_a_wait_lies_where_the_graph_reads_what_is_made_of_it() -> None:
    emit, (group, *_) = emitter()
    first = emit.wait(emit.all_gather(emit.emit(Read(0), group)))
    second = emit.wait(emit.all_gather(emit.emit(Read(), group, [first])))
    emit.emit(Hand(until=5), group, [second])
    nobodys = emit.wait(emit.all_gather(emit.emit(Read(1), group)))
    found = placed(emit)
    assert names(found, 0) == ["read 0", "all_gather 0"] == names(found, 1)
    assert names(found, 5) == ["wait 0", "read 0", "all_gather 0", "wait 0", "hand 0"]
    assert found[-1] == (nobodys, END)


def test_what_the_graph_reads_cannot_come_too_late() -> None:
    emit, (group, *_) = emitter()
    emit.emit(Hand(until=2), group, [emit.wait(emit.all_gather(emit.emit(Read(3), group)))])
    with pytest.raises(AssertionError, match="'hand' comes too late for the graph"):
        placed(emit)


def test_a_chosen_moment_is_not_before_what_it_needs() -> None:
    emit, (group, *_) = emitter()
    emit.emit(Read(4), group, by=2)
    emit.emit(Read(1), group, by=7)
    assert [position for _, position in placed(emit)] == [4, 7]


def test_by_default_gradients_are_complete_where_an_operation_runs() -> None:
    emit, groups = emitter()
    for group in groups:
        emit.emit(Unsaid(), group)
    assert [position for _, position in placed(emit)] == [READY[n] for n in "cba"]


def test_updates_take_the_clipping_coefficient() -> None:
    """Whatever the number of waits of each group: the norm is of all gradients."""
    program = lowered({"c": ("hierarchical_all_reduce", {"inner": 2}), "a": ("all_reduce", {})}, clips=True)
    (clip,) = (c for c in program.calls if c.op.name == "clip")
    updates = [c for c in program.calls if c.op.updates]
    assert [c.inputs[1] for c in updates] == [clip, clip] and clip.inputs == tuple(c.inputs[0] for c in updates)
    assert [p.call for p in program.placed][-4:-1] == [clip, *updates]


def test_communicators_keep_what_is_sent_back_from_waiting() -> None:
    program = lowered(
        {
            "c": ("hierarchical_all_reduce", {"inner": 2}),
            "b": ("partitioned_parameter_server", {"early": 1.0}),
            "a": ("parameter_server", {}),
        }
    )
    sent = [c for c in program.calls if c.op.is_collective and c.group is not None]
    assert [c.communicator for c in sent] == [0, 1, 1, 0, 1, 0, 1]
    early = [p.position for p in program.placed if p.call.op.name == "all_gather" and p.call.group is program.groups[1]]
    assert early == [READY["b"]]  # sent back beside the backward pass, and still in nobody's way


def test_the_last_sums_are_begun_before_an_early_wait() -> None:
    """The sum of c is begun only behind that of a, at the end: its wait must not hold the next sum up."""
    program = lowered({n: ("partitioned_parameter_server", {"early": 1.0}) for n in "acb"})
    assert names(program.placed, END)[:7] == [
        *("pack 0", "reduce_scatter 0", "pack 1", "reduce_scatter 1", "pack 2", "reduce_scatter 2"),
        "wait 0",
    ]


def test_one_rank_updates_as_soon_as_it_can() -> None:
    program = lowered({n: ("partitioned_parameter_server", {"early": 0.5}) for n in "abc"}, world_size=1)
    found = {p.call.owner_group.names[0]: p.position for p in program.placed if p.call.op.updates}
    assert found == READY


def test_without_an_optimizer_nothing_lies_in_the_forward_pass() -> None:
    emit, (group, *_) = emitter(has_optimizer=False)
    emit.emit(Read(0), group)
    assert [position for _, position in placed(emit)] == [START]


def test_calls_that_need_one_another_are_found() -> None:
    emit, (group, *_) = emitter()
    first = emit.emit(Read(), group)
    first.inputs = (emit.emit(Read(), group, [first]),)
    with pytest.raises(AssertionError, match="calls need one another: read, read"):
        placed(emit)
