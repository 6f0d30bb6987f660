"""What TorchDynamo does not trace although it is of no consequence for a graph: traced for the time of a capture.

Where PyTorch does this otherwise in the version that is there, nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._dynamo.variables import ConstantVariable, GetAttrVariable, TorchInGraphFunctionVariable, builtin


@contextlib.contextmanager
def harmless_attributes() -> Iterator[None]:
    """While it is open, `x.requires_grad = flag` is passed over where the forward pass has computed `x` from what needs
    no gradient: those of parameters are the same, and where that of `x` is asked for, the capture fails. The names of
    PyTorch's own classes, as in `type(weight).__module__`, have the methods of strings."""
    with contextlib.ExitStack() as stack:
        setting: Any = getattr(builtin, "SetAttrBuiltinVariable", None)
        if hasattr(setting, "_call_setattr"):
            stack.enter_context(mock.patch.object(setting, "_call_setattr", _set(setting._call_setattr)))
        if hasattr(GetAttrVariable, "call_method"):
            stack.enter_context(mock.patch.object(GetAttrVariable, "call_method", _call(GetAttrVariable.call_method)))
        yield


def _set(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_setattr(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        computed = obj.is_tensor() and obj.source is None
        if computed and name.is_python_constant() and name.as_python_constant() == "requires_grad":
            needs_one = obj.as_proxy().node.meta["example_value"].requires_grad
            if not needs_one:
                return value
        return original(self, tx, obj, name, value)

    return call_setattr


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if isinstance(self.obj, TorchInGraphFunctionVariable):
            held = getattr(self.obj.value, self.name, None)
            if isinstance(held, str):
                return ConstantVariable.create(held).call_method(tx, name, args, kwargs)
        return original(self, tx, name, args, kwargs)

    return call_method
