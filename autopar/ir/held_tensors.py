"""Finds the tensors that a model's output holds, whatever objects it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

MOST = 10_000
"""Objects that are looked at, at most: an output may hold on to a data set."""


def held_tensors(output: Any) -> list[torch.Tensor]:
    """Every tensor in an output, once each, in order: in containers, and in the attributes of objects. Modules, and
    what they hold, are passed over."""
    found: list[torch.Tensor] = []
    waiting, known = [output], {id(output): output}
    while waiting and len(known) < MOST:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
            continue
        inner: list[Any] = []
        if isinstance(value, Mapping):
            inner = [*value.values()]
        elif isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes)):
            inner = [*value]
        elif not isinstance(value, (nn.Module, type)):
            inner = [*getattr(value, "__dict__", {}).values()]
            inner += [getattr(value, n) for n in getattr(type(value), "__slots__", ()) if hasattr(value, n)]
        new = [x for x in inner if id(x) not in known]
        known |= {id(x): x for x in new}  # held, so that no other object gets its id
        waiting += reversed(list({id(x): x for x in new}.values()))
    return found
