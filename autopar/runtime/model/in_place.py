"""What puts back objects that change in place, and hold nothing else: arrays, bytes, generators of random numbers."""

from __future__ import annotations

import array
import copy
import random
from collections.abc import Callable
from functools import partial
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

Back = Callable[[], None]
LARGEST = 2**28
"""Bytes of an array, at most: larger ones are data, of which a copy may take the memory that is left."""


def generator_back(value: Any) -> Back | None:
    """What puts a generator of random numbers back to where it is; `None` for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _set(value, state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        at = copy.deepcopy(bits.state)
        return lambda: setattr(bits, "state", at)
    if isinstance(value, np.random.RandomState):
        of_numpy = copy.deepcopy(value.get_state(legacy=True))
        return lambda: value.set_state(of_numpy)
    if isinstance(value, random.Random) and type(value) is not random.SystemRandom:
        of_python = value.getstate()
        return lambda: value.setstate(of_python)
    return None


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def memory_back(value: Any) -> Back | None:
    """What puts numbers that lie in memory back as they are; `None` for anything else, and for arrays that nobody can
    write to, that are files, or that are too large."""
    if isinstance(value, np.ndarray):
        if not value.flags.writeable or isinstance(value, np.memmap) or value.nbytes > LARGEST:
            return None
        elements = value.copy()
        return lambda: np.copyto(value, elements)
    if isinstance(value, memoryview):
        if value.readonly or not value.c_contiguous or not 0 < value.nbytes <= LARGEST:
            return None
        flat = value.cast("B")
        return partial(_refill, flat, bytes(flat))
    if isinstance(value, (bytearray, array.array)):
        return partial(_refill, value, value[:])
    return None


def _refill(value: Any, content: Any) -> None:
    value[:] = content


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """The slots of a class, or of classes above it, that have `__slots__`."""
    classes = [vars(c) for c in kind.__mro__ if "__slots__" in vars(c)]
    return [s for of in classes for s in of.values() if isinstance(s, MemberDescriptorType)]


def is_filled(slot: MemberDescriptorType, value: Any) -> bool:
    """Whether an object holds something in a slot."""
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True
