"""What a step issues: every collective and wait, with the shapes and dtypes of what it is given."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from autopar.backends import collectives
from autopar.ops.gradients import Norm

COLLECTIVES = (
    collectives.all_reduce,
    collectives.all_gather,
    collectives.all_gather_equal,
    collectives.all_to_all,
    collectives.broadcast,
    collectives.reduce,
    collectives.reduce_scatter,
    collectives.reduce_scatter_equal,
    collectives.all_reduce_copy,
)


class Recorder(torch.fx.Interpreter):
    """Runs a step, and writes down what it issues."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[str] = []
        self._messages: list[Any] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is collectives.all_to_all:
            self._messages.append(result)
        if target in COLLECTIVES or target is collectives.wait:
            shown = [f"{tuple(a.shape)} {a.dtype}" if isinstance(a, torch.Tensor) else repr(a) for a in args]
            # How much of a message goes to whom, the batch decides: virtual compute knows what is expected.
            ragged = target is collectives.all_to_all or any(args[0] is m for m in self._messages)
            self.calls.append(f"{target.__name__} {args[0].dtype if ragged else ' '.join(shown)}")
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, Norm):
            self.calls.append(f"clip {module.group} {module.max_norm}")
        return super().call_module(target, args, kwargs)
