"""Sync groups that have nothing to do in a step in which no rank has a gradient of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.branches import left_out
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.moments import SYNCHRONIZE


def sparable(calls: Iterable[Call]) -> dict[int, frozenset[str]]:
    """Groups that keep nothing from step to step, and whose values nobody else reads, with the names of their
    parameters. The same on all ranks: what a rank has written into its graph is not."""
    found: dict[int, Group] = {}
    kept: set[int] = set()
    for call in calls:
        kept |= {c.group.index for c in call.inputs if c.group is not None and c.group is not call.group}
        if call.group is None:
            continue
        found[call.group.index] = call.group
        if _keeps(call):
            kept.add(call.group.index)
    return {i: frozenset(g.names) for i, g in found.items() if i not in kept}


def used_share(group: Group, calls: Sequence[Call], context: Context) -> float:
    """In how many steps a group is not spared, 0 to 1, where ranks leave branches of the model out independently.
    `calls`: the group's own."""
    spared = left_out(m.parameter.branch for m in group.members) ** context.world_size
    if not spared or context.clips or any(map(_keeps, calls)):  # the norm is that of all gradients
        return 1.0
    return 1.0 - spared


def _keeps(call: Call) -> bool:
    """Whether a call of a group keeps something from step to step, or is one of other gradients than the step's."""
    group = call.owner_group
    return call.op.state_key() is not None or group.compares_own or group.moment != SYNCHRONIZE
