"""Sums over ranks within a model: of each rank's values, with gradients, as an operator that tracing keeps as it is.

The gradient of a sum over ranks is the sum over ranks of the gradients. All ranks must run it equally often, forward
and backward, in a process group that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.backends import collectives

_CHANNELS: dict[str, Callable[[], str | None]] = {}


def register_channel(group: str, make: Callable[[], str | None]) -> None:
    """Has the sums of a group run in another process group, which `make` names, and makes where it is not there yet: by
    all ranks together, as the first sum is run."""
    _CHANNELS[group] = make


def channel_of(group: str) -> str:
    """The process group in which a group's sums run."""
    made = _CHANNELS[group]() if group in _CHANNELS else None
    return group if made is None else made


@torch.library.custom_op("autopar::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the ranks of a process group, given by its name."""
    return collectives.wait(collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), channel_of(group)))


@sum_over_ranks.register_fake
def _shape(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return sum_over_ranks(gradient, ctx.group), None


sum_over_ranks.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("autopar::gather_rows", mutates_args=())
def gather_rows(x: torch.Tensor, sizes: list[int], group: str) -> torch.Tensor:
    """The rows of all ranks, `sizes[r]` of rank r, one after the other. Which rank this one is stands in no graph, as
    ranks compare theirs."""
    whole = x.new_zeros(sum(sizes), *x.shape[1:])
    _own(whole, sizes, group).copy_(x)
    return collectives.wait(collectives.all_reduce(whole, channel_of(group)))


@gather_rows.register_fake
def _gathered_shape(x: torch.Tensor, sizes: list[int], group: str) -> torch.Tensor:
    return x.new_empty(sum(sizes), *x.shape[1:])


@torch.library.custom_op("autopar::own_rows", mutates_args=())
def own_rows(whole: torch.Tensor, sizes: list[int], count: int, group: str) -> torch.Tensor:
    """Of the rows of all ranks, those of this one, `count` of them."""
    return _own(whole, sizes, group).clone()


@own_rows.register_fake
def _own_shape(whole: torch.Tensor, sizes: list[int], count: int, group: str) -> torch.Tensor:
    return whole.new_empty(count, *whole.shape[1:])


def _own(whole: torch.Tensor, sizes: list[int], group: str) -> torch.Tensor:
    rank = collectives.rank_in(group)
    return whole.narrow(0, sum(sizes[:rank]), sizes[rank])


def _keep_sizes(ctx: Any, inputs: tuple[torch.Tensor, list[int], str], output: torch.Tensor) -> None:
    x, ctx.sizes, ctx.group = inputs
    ctx.count = x.shape[0]


def _own_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return own_rows(sum_over_ranks(gradient, ctx.group), ctx.sizes, ctx.count, ctx.group), None, None


gather_rows.register_autograd(_own_gradient, setup_context=_keep_sizes)
