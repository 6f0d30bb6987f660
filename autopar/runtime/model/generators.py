"""Where the generators of random numbers are: PyTorch's on CPU and GPU, Python's and NumPy's."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch


def generators() -> list[Any]:
    """The states of all."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    numpy = np.random.get_state(legacy=True)
    return [torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None, random.getstate(), copy.copy(numpy)]


def set_generators(states: list[Any]) -> None:
    """Puts all where they were."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
    random.setstate(states[2])
    np.random.set_state(states[3])


def same_generators(a: list[Any], b: list[Any]) -> bool:
    """Whether nobody has drawn between the two."""
    same_numpy = all(np.array_equal(x, y) for x, y in zip(a[3], b[3], strict=True))
    same_cuda = a[1] is None or torch.equal(a[1], b[1])
    return torch.equal(a[0], b[0]) and same_cuda and a[2] == b[2] and same_numpy
