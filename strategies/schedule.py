"""The scheduler: from calls, and what each needs, to the order in which a step runs them, and their communicators.

It is a list schedule along the graph's compute: each call is placed behind a position there, each rank runs them in
one order. The rules:

1. A call runs as soon as it may: behind its inputs, and behind what it reads of the graph (`Operation.behind`); where
   its strategy has chosen a moment (`Call.by`), not before that. A program without an optimizer has no part in the
   forward pass.
2. A wait runs as late as its value is needed: by what its strategy says, or by the first node of the graph that reads
   what is made of it (`Operation.needed`). What the step before has begun is waited for and stored just before the
   graph first reads the group's parameters.
3. What no node of the graph needs is waited for behind the backward pass. There, calls take turns: a wait opens the
   next turn of its group, and in each turn one group follows the other, as their sums come in. The clipping
   coefficient opens a turn for all groups. What the next step waits for goes last in its turn, in the order in which it
   is needed there.
4. Calls of one queue (`Operation.queue`: gradients that are summed, counts of rows) keep the order of the groups: each
   runs as soon as it may and the one before it has run.
5. Behind one position, calls keep the order in which they were recorded. At the end of the backward pass, the sums of
   the gradients that are complete only there are begun first; then comes what has had time until there; then the turns.
6. The sum of the batches' weights goes before everything; the step's other small sums go last behind their positions.
7. What is sent behind the backward pass, and parameters that are sent for a pass to come, go through a communicator of
   their own, 1: they do not wait for what is sent beside the backward pass, through 0.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    order = _Order(calls, graph, context)
    todo = calls
    while todo:
        later = [c for c in todo if not order.take(c)]
        assert len(later) < len(todo), f"calls need one another: {', '.join(c.op.name for c in later)}"
        todo = later
    return order.placed()


class _Order:
    """Takes calls in, each behind its inputs."""

    def __init__(self, calls: Sequence[Call], graph: TrainingGraph, context: Context) -> None:
        self.end = len(graph.compute) - 1
        self.start = -1 if context.has_optimizer else graph.backward_start - 1
        """Behind this position, the first call may run."""
        self.several = context.world_size > 1
        self.needed, self.due = deadlines(calls)
        self.at: list[int | None] = [None] * len(calls)
        """By index: the position; `None` for calls not taken in yet."""
        self.turn = [0] * len(calls)
        """By index, of calls behind the backward pass: the turn; 0 of all others."""
        self.queued: dict[str, int] = {}
        """The position of each queue's last call."""
        self.begin: list[Placed] = []
        self.beside: list[Placed] = []
        self.until_end: dict[int, Placed] = {}
        """By index: what has had time until the end of the backward pass."""
        self.in_turns: list[tuple[tuple[int, ...], Call]] = []
        """With what they are sorted by, which no two have in common."""
        self.of_step: list[Placed] = []

    def take(self, call: Call) -> bool:
        """Places a call, unless one of its inputs is not placed yet; returns whether it did."""
        op, group, index = call.op, call.group, call.index
        if call.completes_step_before:
            self.at[index] = position = call.owner_group.first_use - 1
            self.beside.append(Placed(call, position))
            return True
        position, turn = self.start, 0
        for i in call.inputs:
            made = self.at[i.index]
            if made is None:
                return False
            position, turn = max(position, made), max(turn, self.turn[i.index])
        if group is None:
            self._take_of_step(call, turn + 1)
            return True
        waits = op.waits_for(call) is not None
        if waits and index not in self.due:
            turn += 1
        if op.is_collective and (turn or call.inputs[0].op.makes_parameters):
            call.communicator = 1
        if turn:
            self.at[index] = position = self.end
            self.turn[index] = turn
            deferred, first_use = (1, group.first_use) if call.deferred else (0, 0)
            self.in_turns.append(((turn, deferred, first_use, group.index, index), call))
        else:
            position = max(position, op.behind(group))
            position = self._take_beside(call, position, self.due[index] if waits else call.by)
        if index in self.needed:
            last = max(self.needed[index], op.behind(group))
            assert not turn and position <= last, f"'{op.name}' comes too late for the graph, which reads its value"
        return True

    def _take_beside(self, call: Call, position: int, by: int | None) -> int:
        """Places a call beside the graph's compute, behind `position` or, if that is later, behind `by`; returns where
        it is."""
        queue = call.op.queue
        if by is not None and by > position:
            position = by
        if queue and self.several:
            position = self.queued[queue] = max(position, self.queued.get(queue, position))
        if position >= self.end:
            position = self.end
        self.at[call.index] = position
        if position == self.end and self.several and self._has_time(call):
            self.until_end[call.index] = Placed(call, position)
        else:
            self.beside.append(Placed(call, position))
        return position

    def _has_time(self, call: Call) -> bool:
        """Of a call at the end of the backward pass: whether it has had time until there, as all have but the calls of
        queues and what is made of these alone, up to the first wait."""
        if call.op.queue:
            return False
        inputs = call.inputs
        return not inputs or any(
            i.is_pending or self.at[i.index] != self.end or i.index in self.until_end for i in inputs
        )

    def _take_of_step(self, call: Call, turn: int) -> None:
        """Places a call of the whole step: one of its own small sums, or what is made of all groups' values."""
        if call.by is None:
            self.at[call.index], self.turn[call.index] = self.end, turn
            self.in_turns.append(((turn, 0, 0, -1, call.index), call))
            return
        self.at[call.index] = call.by
        first = call.op.is_collective and call.by == self.start
        (self.begin if first else self.of_step).append(Placed(call, call.by))

    def placed(self) -> list[Placed]:
        """All calls, in execution order."""
        self.in_turns.sort()
        behind = [Placed(c, self.end) for _, c in self.in_turns]
        found = [*self.begin, *self.beside, *self.until_end.values(), *behind, *self.of_step]
        found.sort(key=attrgetter("position"))
        return found


def deadlines(calls: Sequence[Call]) -> tuple[dict[int, int], dict[int, int]]:
    """By index: the position by which the graph reads a call's value; and its deadline, of its strategy's or of what is
    made of its value."""
    needed: dict[int, int] = {}
    due: dict[int, int] = {}
    for c in reversed(calls):
        if c.group is None or c.completes_step_before:
            continue
        by, read = c.by, c.op.needed(c.group)
        if read is not None:
            needed[c.index] = read
            by = read if by is None else min(by, read)
        if c.index in due:
            by = due[c.index] if by is None else min(by, due[c.index])
        if by is not None:
            due[c.index] = by
            for i in c.inputs:
                due[i.index] = min(by, due.get(i.index, by))
    return needed, due
