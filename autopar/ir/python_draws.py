"""Random numbers that a model draws from Python's `random` and from NumPy in its forward pass.

TorchDynamo runs `random.randint` and its like once, and a graph has that one number written into it; from 2.15 on it
does so with all functions of `random`. It traces functions of `numpy.random` as PyTorch's own, which draw from another
stream. Either is refused, with the line: the model then runs eagerly, where each step draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._dynamo import config
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import misc, user_defined


@contextlib.contextmanager
def refused_draws() -> Iterator[None]:
    """While it is open, TorchDynamo does not trace what draws from Python's or NumPy's random numbers."""

    def of_function(tx: Any, function: Any, *_: Any, **__: Any) -> Any:
        _refuse(function.__name__)

    def of_object(self: Any, tx: Any, name: str, *_: Any, **__: Any) -> Any:
        _refuse(name)

    with (
        mock.patch.object(user_defined, "call_random_fn", of_function),
        mock.patch.object(misc.RandomVariable, "call_method", of_object),
        config.patch(use_numpy_random_stream=True),
    ):
        yield


def _refuse(name: str) -> None:
    said = f"a number is drawn by `Random.{name}`"
    unimplemented(gb_type=said, context="", explanation=said, hints=[])
