"""What a step issues: every collective and wait, with the shapes and dtypes of what it is given."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from autopar.backends import collectives
from autopar.ops.gradients import Norm
from autopar.runtime.writer import CALL


class Recorder(torch.fx.Interpreter):
    """Runs a step, and writes down what it issues."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[str] = []
        self._messages: list[Any] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        result = super().run_node(n)
        call, is_value = n.meta.get(CALL, (None, False))
        if (is_value and call.is_pending) or n.target is collectives.wait:
            # How much of a message goes to whom, the batch decides: virtual compute knows what is expected.
            ragged = n.target is collectives.all_to_all or any(args[0] is m for m in self._messages)
            if n.target is collectives.all_to_all:
                self._messages.append(result)
            shown = [f"{tuple(a.shape)} {a.dtype}" if isinstance(a, torch.Tensor) else repr(a) for a in args]
            name = getattr(n.target, "__name__", str(n.target))
            self.calls.append(f"{name} {args[0].dtype if ragged else ' '.join(shown)}")
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, Norm):
            self.calls.append(f"clip {module.group} {module.max_norm}")
        return super().call_module(target, args, kwargs)
