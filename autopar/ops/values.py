"""What operations declare: their values, and what they take of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.ops.layouts import REPLICATE, Layout

Bytes = int | npt.NDArray[np.int64]
"""Bytes: one number where all ranks have as many, else an array by rank."""


@dataclass(frozen=True, slots=True)
class Value:
    """The flat value that an operation makes."""

    elements: int
    """Elements of the value; of a sharded value, over all ranks."""
    dtype: str
    """The number format in memory and on the wire."""
    layout: Layout = REPLICATE
    expected: bool = False
    """Whether `elements` and the sizes of shards are only expected: the batch decides, and ranks may differ."""


class Work(NamedTuple):
    """What an operation does on a rank's device."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    """Bytes read and written."""
    updated_bytes: float = 0.0
    """Bytes read and written by an optimizer's update."""
    kernels: float = 0.0
    """Kernels started one after the other; fractions stand for Python's own time, in units of a kernel's start."""


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Setting:
    """What the cost of an operation may depend on besides itself."""

    world_size: int
    moved_tensors: int = 0
    """Tensors of a parameter's size that the optimizer reads and writes for each tensor that it updates."""
    rounds: bool = False
    """Whether the backend leaves large exchanges to rounds of our own, as gloo does on CPUs."""
    sums: bool = False
    """Whether its own reduce-scatter adds up equal parts on their way, as NCCL's does."""
