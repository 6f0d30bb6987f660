"""The scheduler: from calls, and what each needs, to the order in which a step runs them, and their communicators.

It is a list schedule along the order of the graph's compute: each call is placed behind a position there. The order is
the same on every rank, whatever the batch. The rules:

1. A call runs as soon as it may: behind its inputs, and behind what it reads of the graph (`Operation.behind`); with a
   deadline of its strategy (`Call.by`), not before that. A program without an optimizer has no part in the forward
   pass.
2. A wait runs as late as its value is needed: at its deadline, or at that of what is made of it, the position behind
   which the graph reads it (`Operation.needed`). What the step before has begun is waited for, and stored, before the
   graph first reads the group's parameters.
3. What nothing in the graph needs is waited for behind the backward pass. There calls take turns: each wait ends a turn
   of its group, and the groups follow one another in each turn, as their sums come in. The clipping coefficient ends a
   turn of all groups. What the next step waits for goes last in its turn, in the order in which it is needed.
4. Calls of one queue (`Operation.queue`: the gradients that are summed, the counts of rows) are in the order of the
   groups, each as soon as what it reads is there and the one before it has run.
5. Behind one position, calls are in the order in which they were recorded. At the end of the backward pass the sums of
   queues go first, which are on their way longest; then what has had time until there; then the turns.
6. The sum of the batches' weights goes before everything; the step's other small sums go last behind their positions.
7. What is sent behind the backward pass, and parameters that are sent for a pass to come, have a communicator of their
   own (1): they do not wait for what is sent beside the backward pass (0).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

from autopar.ir.training_graph import TrainingGraph
from autopar.ops.base import Call
from autopar.ops.context import Context


class Placed(NamedTuple):
    """A call, and the position in the graph's compute behind which it runs (-1: before everything)."""

    call: Call
    position: int


def schedule(calls: Sequence[Call], graph: TrainingGraph, context: Context) -> list[Placed]:
    """Puts the calls of a step in order, and fills their communicators in. `calls[i]` has the index i."""
    end = len(graph.compute) - 1
    first = -1 if context.has_optimizer else graph.backward_start - 1
    several = context.world_size > 1
    due = _due(calls)
    at: list[int | None] = [None] * len(calls)
    turns = [0] * len(calls)
    """Of what lies behind the backward pass: the turn."""
    queued: dict[str, int] = {}
    """By queue: behind which position its last call is."""
    before: list[Placed] = []
    beside: list[Placed] = []
    had_time: dict[int, Placed] = {}
    """What has had time until the end, by its index."""
    behind: list[tuple[tuple[int, ...], Call]] = []
    sums: list[Placed] = []
    """Those of the step."""
    todo: Sequence[Call] = calls
    while todo:
        later = []
        for c in todo:
            op, group, index = c.op, c.group, c.index
            if group is None and c.by is not None:
                (before if c.by == first and op.is_collective else sums).append(Placed(c, c.by))
                continue
            if c.completes_step_before:
                at[index] = position = c.owner_group.first_use - 1
                beside.append(Placed(c, position))
                continue
            position, turn = first, 0
            for i in c.inputs:
                made = at[i.index]
                if made is None:
                    later.append(c)
                    break
                position, turn = max(position, made), max(turn, turns[i.index])
            else:
                waits = op.waits_for(c) is not None
                turn += group is None or (waits and index not in due)
                if op.is_collective and (turn or c.inputs[0].op.makes_parameters):
                    c.communicator = 1
                if turn or group is None:
                    at[index], turns[index] = end, turn
                    behind.append((_turn(c, turn), c))
                    continue
                position = max(position, op.behind(group), due[index] if waits else -1 if c.by is None else c.by)
                if op.queue and several:
                    position = queued[op.queue] = max(position, queued.get(op.queue, first))
                at[index] = position = min(position, end)
                if position == end and several and (waits or _has_time(c, at, had_time, end)):
                    had_time[index] = Placed(c, end)
                else:
                    beside.append(Placed(c, position))
        assert len(later) < len(todo), f"calls need one another: {', '.join(c.op.name for c in later)}"
        todo = later
    behind.sort()
    found = [*before, *beside, *had_time.values(), *(Placed(c, end) for _, c in behind), *sums]
    found.sort(key=attrgetter("position"))
    return found


def _due(calls: Sequence[Call]) -> dict[int, int]:
    """By index: the deadline of each call that has one, of its strategy's or of what is made of its value."""
    due: dict[int, int] = {}
    for c in reversed(calls):
        if c.group is None or c.completes_step_before:
            continue
        deadline, known = due.get(c.index), c.op.needed(c.group)
        if known is not None and (deadline is None or known < deadline):
            deadline = known
        if c.by is not None and (deadline is None or c.by < deadline):
            deadline = c.by
        if deadline is not None:
            due[c.index] = deadline
            for i in c.inputs:
                due[i.index] = min(deadline, due.get(i.index, deadline))
    return due


def _turn(c: Call, turn: int) -> tuple[int, ...]:
    """Sorts what lies behind the backward pass."""
    if c.group is None:
        return turn, 0, 0, -1, c.index
    return turn, c.deferred, c.group.first_use if c.deferred else 0, c.group.index, c.index


def _has_time(c: Call, at: Sequence[int | None], had_time: Collection[int], end: int) -> bool:
    """Of a call at the end of the backward pass: whether it had time until there, as what sums take has not."""
    if c.op.queue:
        return False
    return not c.inputs or any(at[i.index] != end or i.index in had_time for i in c.inputs)
