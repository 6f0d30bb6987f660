"""What is no tensor, in a batch or in an attribute that a model reads: it is part of a graph, and told from what lies
there later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.ir.held_tensors import held_tensors

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Kinds of values that hold nothing else."""


@dataclass(frozen=True)
class Constant:
    """What is no tensor. To Python `1 == 1.0 == True` and `0.0 == -0.0`, of which a model may make other things."""

    kind: type
    value: Any
    """Of a float or complex number as it is written out, which tells zeros apart and knows NaN again; of a container or
    a slice, what it is made of; `None` of what no graph can be made for."""

    def __repr__(self) -> str:
        return self.value if issubclass(self.kind, (float, complex)) else repr(self.value)


def constant(x: Any) -> tuple[Constant, str]:
    """What tells a value from others; and why no graph can be made for a batch with it, empty where one can."""
    kind = type(x)
    if kind in PLAIN or isinstance(x, (float, complex)):
        return Constant(kind, repr(x) if isinstance(x, (float, complex)) else x), ""
    if kind in (slice, range, set, frozenset) or isinstance(x, (tuple, list)):
        parts = list(map(constant, (x.start, x.stop, x.step) if kind in (slice, range) else x))
        made = (frozenset if kind in (set, frozenset) else tuple)(part for part, _ in parts)
        return Constant(kind, made), next((why for _, why in parts if why), "")
    why = _unseen(x)
    return Constant(kind, None if why else x), why


def _unseen(x: Any) -> str:
    what = f"the batch holds an object of type {type(x).__module__}.{type(x).__qualname__}"
    try:
        hash(x)
    except TypeError:
        return (
            f"{what}, which cannot be told from that of another batch, so that a graph would hold on to its value: "
            "pass tensors, numbers, strings, dataclasses, or containers of these"
        )
    if not isinstance(x, (nn.Module, type)) and held_tensors(x):
        return (
            f"{what} that holds tensors, which a graph would not take as its inputs: pass the tensors themselves, or "
            "in a dataclass, a dict, a tuple or a list"
        )
    return ""
