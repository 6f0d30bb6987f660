"""What is no tensor, told apart as a model may tell it apart: to Python `1 == 1.0 == True` and `0.0 == -0.0`."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Constant:
    """A value and its type. Two are equal where both are written alike."""

    kind: type
    value: Any
    """Of a float or complex number as it is written out, which tells zeros apart and knows NaN again; of a tuple, list
    or slice a tuple of `Constant`s, of a set a set of them."""

    def __repr__(self) -> str:
        if issubclass(self.kind, (float, complex)):
            return str(self.value)
        if self.kind is slice:
            return f"slice{self.value}"
        return str(set(self.value)) if issubclass(self.kind, Set) else repr(self.value)


def constant_of(value: Any) -> Constant:
    """The `Constant` that a value is."""
    kind = type(value)
    if isinstance(value, (float, complex)):
        return Constant(kind, repr(value))
    if isinstance(value, (tuple, list)):
        return Constant(kind, tuple(map(constant_of, value)))
    if kind is slice:
        return Constant(kind, tuple(map(constant_of, (value.start, value.stop, value.step))))
    if isinstance(value, Set):
        return Constant(kind, frozenset(map(constant_of, value)))
    return Constant(kind, value)
