"""Gradients that reach a captured drop-in module's parameters from elsewhere, which the module does not synchronize.

`DistributedDataParallel` sums whatever a backward pass adds up on a parameter. A captured module synchronizes what its
own graph computes, so what comes from `module.module`, or from a term of the loss that reads parameters, stays this
rank's own. That is right where it is the same on all ranks, as a penalty on weights is, and is said in any case.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from autopar.errors import AutoparWarning


class OtherGradients:
    """Looks at the 1st, 2nd, 4th, 8th, ... synchronized backward pass of one module on this rank."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: by name."""
        self._parameters = parameters
        self._passes = 0
        self._task = -1
        self._is_watching = False
        self._own: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._found: str | None = None
        self._said = False

    def expect(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Within a backward pass, whose gradients autograd is about to add to `grad`: what the module delivers."""
        if self._said:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._end()
            self._task = task
            self._passes += 1
            self._is_watching = self._passes & (self._passes - 1) == 0
            if self._is_watching:
                Variable._execution_engine.queue_callback(self._say)
        if not self._is_watching:
            return
        for name, gradient in gradients.items():
            p = self._parameters[name]
            if name in self._own:
                self._own[name] = self._own[name] if gradient is None else self._own[name] + gradient
            elif gradient is not None and not p._backward_hooks:  # a hook of the user's may change what comes
                self._own[name] = gradient
                self._hooks.append(p.register_hook(partial(self._comes, name)))  # type: ignore[no-untyped-call]

    def _comes(self, name: str, gradient: torch.Tensor) -> None:
        own = self._own.pop(name, None)
        if own is None or own is gradient or self._found is not None:
            return
        # Several gradients of the module's own may be added up in another order.
        rest = (gradient - own).abs().max() if own.numel() else own.new_zeros(())
        if bool(rest > 64 * torch.finfo(own.dtype).eps * own.abs().max()):
            self._found = name

    def _say(self) -> None:
        """After a backward pass."""
        self._end()
        if self._found is None:
            return
        self._said = True
        warnings.warn(
            f"parameter '{self._found}' gets a gradient in the module's backward pass that the module has not "
            "computed: from module.module, or from a term of the loss that reads the parameter. It stays this rank's "
            "own, and replicas drift apart unless it is the same on all ranks, as a penalty on weights is. "
            "capture='never' synchronizes all that comes, as DistributedDataParallel does",
            AutoparWarning,
            stacklevel=2,
        )

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._task, self._own, self._hooks = -1, {}, []
