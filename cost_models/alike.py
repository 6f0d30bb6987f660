"""Ranks that are alike: what is the same for many of them is worked out once.

A cluster of a thousand ranks has a few kinds of them: those of one kind of device that hold as much of everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.ops.base import Call
from autopar.ops.subgroups import Subgroups

Indices = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]
FEW = 16
"""So few columns are compared sooner in Python than by sorting them."""


def alike(rows: Sequence[Rows], count: int) -> tuple[Indices, Indices]:
    """Of `count` columns, the first of each set of equal ones, ascending; and for each column, the place among these of
    the one that it equals. `rows`: what is known of the columns, [count] or [any, count], of any dtype."""
    if not rows:
        return np.zeros(1, np.int64), np.zeros(count, np.int64)
    different = {(row.tobytes(), row.dtype): row for row in rows}.values()  # layers are alike
    if count <= FEW:
        numbers: dict[tuple[object, ...], int] = {}
        values = zip(*(line for row in different for line in row.reshape(-1, count).tolist()), strict=True)
        few = [numbers.setdefault(column, len(numbers)) for column in values]
        return np.array([few.index(i) for i in range(len(numbers))]), np.array(few)
    columns = [np.ascontiguousarray(row.reshape(-1, count).T).view(np.uint8).reshape(count, -1) for row in different]
    table = np.concatenate(columns, axis=1)
    keys = np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1]))).ravel()
    _, first, of_column = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[of_column]


def alike_in(call: Call, devices: Indices) -> tuple[Indices, Indices]:
    """Ranks that do the same in a call, as `alike` says it: whose devices are of one kind, that hold as much of the
    call's value and of what it takes, and whose subgroups hold alike. `devices`: by rank, the number of its kind."""
    n = len(devices)
    rows: list[Rows] = [devices] if devices.any() else []
    calls = [call, *call.inputs, *(i for c in call.inputs for i in c.inputs)]
    rows += [c.held_by_rank(n) for c in calls if c.is_sharded and len(set(c.sizes)) != 1]
    for subgroups in dict.fromkeys(c.op.subgroups for c in calls if c.op.subgroups):
        rows.append(_kinds_of_subgroups(subgroups, alike(rows, n)[1]))
    if others := call.op.differs_on(call):
        rows.append(np.isin(np.arange(n), others))
    return alike(rows, n)


def _kinds_of_subgroups(subgroups: Subgroups, kinds: Indices) -> Indices:
    """By rank: a number of its subgroup, equal for those of which as many ranks are of each kind."""
    found, numbers = np.zeros_like(kinds), dict[bytes, int]()
    for subgroup in map(list, subgroups):
        found[subgroup] = numbers.setdefault(np.sort(kinds[subgroup]).tobytes(), len(numbers))
    return found
