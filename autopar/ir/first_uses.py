"""The moment at which a model that runs eagerly first uses each of its parameters, seen as it does so.

A parameter that is watched has another class, whose `__torch_function__` PyTorch calls before anything reads the
parameter: its function is called, and the parameter is a plain one again. Others cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_TOLD = "_autopar_told"
_ABOUT: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "itemsize",
        "is_sparse", "is_quantized", "is_meta", "is_cuda", "is_cpu", "_version", "_backward_hooks",
    )
) | frozenset(
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
                 "is_contiguous", "get_device", "storage_offset", "ndimension", "__len__", "__hash__")
)  # fmt: skip
"""What says something of a parameter, and does not read its values."""


class _Watched(nn.Parameter):
    """A parameter that tells of its first use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # who is told may write to others that are watched
            if func not in _ABOUT:
                for leaf in pytree.tree_leaves((args, kwargs)):
                    if isinstance(leaf, _Watched):
                        _tell(leaf)
            return func(*args, **kwargs)


def watchable(models: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Names of the parameters that can be watched: not those of another class, nor those of modules whose code does
    not run in Python (TorchScript), or is compiled and would be so again for another class."""
    hidden: set[int] = set()
    for module in (m for model in models for m in model.modules()):
        is_compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            hidden |= {id(p) for p in module.parameters()}
    return {n for n, p in parameters.items() if type(p) is nn.Parameter and id(p) not in hidden}


@dataclass
class Watch:
    """What watching parameters has met."""

    compiler_began: bool = False
    """Whether PyTorch's compiler has begun to trace a function that the model calls: it would trace who is told, too,
    and compile anew in each step. All were told before it looked at them; who watches again would meet it again."""


@contextmanager
def watched(told: Iterable[tuple[nn.Parameter, Callable[[], None]]]) -> Iterator[Watch]:
    """While it is open, each parameter's first use calls its function."""
    found = Watch()
    parameters: list[nn.Parameter] = []

    def tell_all(*_: Any) -> None:
        found.compiler_began = True
        for parameter in parameters:
            _tell(parameter)

    with ExitStack() as stack:
        for parameter, tell in told:
            parameter.__dict__[_TOLD] = tell
            parameter.__class__ = _Watched
            stack.callback(_let_go, parameter)
            parameters.append(parameter)
        compiler = sys.modules.get("torch._dynamo.callback")  # who has compiled anything has imported it
        if parameters and compiler is not None:
            compiler.callback_handler.register_start_callback(tell_all)
            stack.callback(compiler.callback_handler.remove_start_callback, tell_all)
        yield found


def _tell(parameter: nn.Parameter) -> None:
    """Tells of the use of a parameter, unless that was done."""
    if isinstance(parameter, _Watched):
        tell = parameter.__dict__[_TOLD]
        _let_go(parameter)
        tell()


def _let_go(parameter: nn.Parameter) -> None:
    if isinstance(parameter, _Watched):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        parameter.__dict__.pop(_TOLD, None)
