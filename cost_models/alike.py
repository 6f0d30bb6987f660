"""Ranks that are alike: what is the same for many of them is worked out once.

A cluster of a thousand ranks has a few kinds of them: those of one kind of device that hold as much of everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]


def alike(rows: Sequence[Rows], count: int) -> tuple[Indices, Indices]:
    """Of `count` columns, the first of each set of equal ones, ascending; and for each column, the place among these of
    the one that it equals. `rows`: what is known of the columns, [count] or [any, count], of any dtype."""
    if not rows:
        return np.zeros(1, np.int64), np.zeros(count, np.int64)
    columns = [np.ascontiguousarray(row.reshape(-1, count).T).view(np.uint8).reshape(count, -1) for row in rows]
    table = np.concatenate(columns, axis=1)
    keys = np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1]))).ravel()
    _, first, of_column = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[of_column]
