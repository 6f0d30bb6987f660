"""Tensors as they are, kept and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from autopar.runtime.model.generators import generators, set_generators
from autopar.runtime.model.shared_memory import once

Back = Callable[[], object]
"""Puts back what was kept."""


def all_of(each: Sequence[Back]) -> Callable[[], None]:
    """Puts back what each of several has kept, in order."""

    def put_back() -> None:
        for one in each:
            one()

    return put_back


def copies(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Copies tensors, and where the generators of random numbers are; what is returned puts that back."""
    before = [(once(t), once(t).clone()) for t in tensors]
    random = generators()

    def put_back() -> None:
        set_generators(random)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)

    return put_back
