"""Hugging Face's recording of hidden states and router logits, made traceable.

Models that record install forward hooks at their first forward pass, under a lock, and the hooks find out through a
context variable whether to record. TorchDynamo can trace neither. So the hooks are installed before the capture, and
during it the variable is a plain attribute. Where `transformers` is not imported, or does all this otherwise, nothing
is done.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def traceable_recording(model: nn.Module) -> Iterator[None]:
    """While it is open, models of Hugging Face's that record can be traced."""
    recording = sys.modules.get("transformers.utils.output_capturing")
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    install = getattr(recording, "maybe_install_capturing_hooks", None)
    variable = type(getattr(recording, "_active_collector", None))
    methods = {name: getattr(variable, name, None) for name in ("get", "set", "reset")}
    if base is None or install is None or None in methods.values():
        yield
        return
    for module in model.modules():
        if isinstance(module, base):
            install(module)
    for name, replacement in (("get", _get), ("set", _set), ("reset", _reset)):
        setattr(variable, name, replacement)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(variable, name, method)


def _get(self: Any) -> Any:
    return self.global_var


def _set(self: Any, value: Any) -> Any:
    before = self.global_var
    self.global_var = value
    return before


def _reset(self: Any, before: Any) -> None:
    self.global_var = before
