"""The options that say in which number formats a model is trained: its own, and autocast's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = ("float32", "bfloat16", "float16", "float64")


def dtype_option(function: F) -> F:
    """Adds `--dtype`, passed on as `dtype`."""
    return click.option(
        "--dtype", type=click.Choice(DTYPES), help="Make the model and its inputs in this format. Default: as they are."
    )(function)


def autocast_option(function: F) -> F:
    """Adds `--autocast`, passed on as `autocast`."""
    return click.option(
        "--autocast",
        type=click.Choice(DTYPES[1:3]),
        metavar="DTYPE",
        help="Plan for steps that run under torch.autocast with this format: bfloat16 or float16.",
    )(function)


@contextlib.contextmanager
def made_in(dtype: str | None) -> Iterator[None]:
    """While it is open, tensors of floating-point numbers are made in this format where nothing else is said."""
    if dtype is None:
        yield
        return
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_dtype(value: Any, dtype: str) -> Any:
    """A batch, or a part of one, whose tensors of floating-point numbers have this format."""
    import torch
    from torch.utils import _pytree as pytree

    def converted(x: torch.Tensor) -> torch.Tensor:
        return x.to(getattr(torch, dtype)) if x.is_floating_point() else x

    return pytree.tree_map_only(torch.Tensor, converted, value)


@contextlib.contextmanager
def autocasting(model: torch.nn.Module, dtype: str | None) -> Iterator[None]:
    """While it is open, what is captured of the model runs under autocast, as the user's steps will."""
    if dtype is None:
        yield
        return
    import torch

    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
    with torch.autocast(device, dtype=getattr(torch, dtype)):
        yield
