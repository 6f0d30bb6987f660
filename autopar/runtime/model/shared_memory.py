"""Memory that is several things at once: of two parameters, or of several elements of one tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

import torch
from torch import nn

from autopar.errors import OptimizerError, PlanError


def check_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises `OptimizerError` where two parameters that are trained overlap in memory, or one overlaps with itself: the
    order of their updates decides what they become, and a plan may update them on different ranks. Raises `PlanError`
    where one is spread over the ranks by another program."""
    names = {p: n for n, p in reversed(list(parameters.items())) if p.requires_grad and p.numel()}
    spans = sorted((*_span(p), n) for p, n in names.items())
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise OptimizerError(
                f"parameters '{first}' and '{second}' share memory, but are two parameters, each with an update of its "
                "own: make them one (`b.weight = a.weight`), or give one memory of its own (`p.data = p.data.clone()`)."
                " With optimize() without an optimizer they may stay as they are"
            )
    for name, p in parameters.items():
        if is_spread(p):
            raise PlanError(
                f"parameter '{name}' holds no values: another program has spread its rows over the ranks. Use it "
                "within 'with that_program.gathered():', which all ranks must enter, or give that program a plan that "
                "leaves parameters whole, as strategy='ddp' does"
            )
    for p, name in names.items():
        if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
            raise OptimizerError(
                f"parameter '{name}' of shape {tuple(p.shape)} is expanded: several of its elements are one place in "
                "memory. Give it memory of its own with `p.data = p.data.contiguous()`"
            )


def is_spread(p: nn.Parameter) -> bool:
    """Whether a program has spread a parameter's rows over the ranks, and left a stand-in here, all of whose elements
    are one that is no number."""
    return p.numel() > 1 and not any(p.stride()) and bool(p.detach().reshape(-1)[0].isnan())


class Memory:
    """Looks whether parameters have got other memory, as by `p.data = ...`, and whether two then share it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        check_memory(parameters)
        self._parameters = dict(parameters)
        self._addresses = [p.data_ptr() for p in self._parameters.values()]

    def check(self, elsewhere: Collection[str]) -> None:
        """Raises `OptimizerError` where two parameters overlap. `elsewhere`: names of those that have no memory now, of
        tied ones one of the names."""
        if not self._parameters.keys().isdisjoint(elsewhere):
            gone = {id(p) for n, p in self._parameters.items() if n in elsewhere}
            self._parameters = {n: p for n, p in self._parameters.items() if id(p) not in gone}
        addresses = [p.data_ptr() for p in self._parameters.values()]
        if addresses != self._addresses:
            check_memory(self._parameters)
        self._addresses = addresses


def _span(p: nn.Parameter) -> tuple[int, int]:
    """The addresses between which a parameter lies."""
    last = sum(stride * (size - 1) for stride, size in zip(p.stride(), p.shape, strict=True))
    return p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size()


def once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, each element once: an expanded dimension, all of whose elements are one, has one."""
    tensor = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
