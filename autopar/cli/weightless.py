"""Makes models without their weights: what a factory makes is on the `meta` device, whoever wrote it.

Parameters go to the `meta` device as a module registers them, before they are given values. What a module makes
besides, as buffers and tables of rotary frequencies, is real, as are batches; only what is large is not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

_LARGE_BYTES = 16 * 2**20
"""What the constructor of a module makes of so many bytes or more is not made for real, even before it is
registered."""
_MAKERS = frozenset(
    (torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint)
)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """While it is open, modules have parameters on the `meta` device, which take no memory."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if type(param) is nn.Parameter and param.device.type != "meta":
            _empty(param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _empty(param: nn.Parameter) -> None:
    """Puts a parameter on the `meta` device; it stays the same object, which may be tied. One that something refers to
    weakly, as autograd does, is left as it is."""
    twin = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    twin.__dict__.update(param.__dict__)
    with contextlib.suppress(RuntimeError):
        swap_tensors(param, twin)  # type: ignore[no-untyped-call]


class _LargeOnMeta(TorchFunctionMode):
    """Has the constructors of modules make large tensors on the `meta` device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _MAKERS:
            with contextlib.suppress(Exception):  # what cannot be made there is made where it was to be
                found = func(*args, **given | {"device": "meta"})
                if found.numel() * found.element_size() >= _LARGE_BYTES and _in_constructor():
                    return found
        return func(*args, **given)


def _in_constructor() -> bool:
    """Whether the constructor of a module is running."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "__init__" and code.co_argcount else None
        if isinstance(owner, nn.Module):
            return True
    return False
