"""Values as JSON has them, and back: settings, counters, and the names of tensors.

None, booleans, whole numbers of 64 bits, finite numbers, texts and lists stand as they are; others as an object with
one key, which says what it is: {"tensor": name}, {"tuple": [...]}, {"dict": {...}}, {"float": "inf"},
{"bytes": base64}.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from autopar.errors import SpecError

Name = Callable[[str, torch.Tensor], str]
"""Keeps a tensor that was found at a path, and returns its name."""


def to_json(value: Any, path: str, name: Name) -> Any:
    """The value for JSON; raises `SpecError`, with its path, where a checkpoint on disk cannot hold it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor):
        return {"tensor": name(path, value)}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) in (list, tuple, torch.Size):
        items = [to_json(v, f"{path}.{i}", name) for i, v in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {"dict": {k: to_json(v, f"{path}.{k}", name) for k, v in value.items()}}
    raise SpecError(
        f"{path} is a {type(value).__name__}, which a checkpoint on disk cannot hold: only tensors, numbers, texts and "
        "lists, tuples and dicts of these. Use program.state_dict(), and write that yourself"
    )


def from_json(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that `to_json` was given; `tensor` returns the tensor of a name. Raises `SpecError` where it is none
    that `to_json` writes."""
    if isinstance(value, list):
        return [from_json(v, tensor) for v in value]
    if not isinstance(value, dict):
        return value
    kind, what = next(iter(value.items())) if len(value) == 1 else ("", None)
    if kind == "tensor" and isinstance(what, str):
        return tensor(what)
    if kind == "tuple" and isinstance(what, list):
        return tuple(from_json(v, tensor) for v in what)
    if kind == "dict" and isinstance(what, dict):
        return {k: from_json(v, tensor) for k, v in what.items()}
    if kind == "float" and what in ("inf", "-inf", "nan"):
        return float(what)
    if kind == "bytes" and isinstance(what, str):
        try:
            return base64.b64decode(what, validate=True)
        except ValueError as e:
            raise SpecError(f"the checkpoint's index holds bytes that are no base64: {e}") from e
    raise SpecError(f"the checkpoint's index holds {str(value)[:80]}, which is no value that program.save writes")
