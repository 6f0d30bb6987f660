"""A model in evaluation mode: a program's, while a block is open; a drop-in module's, which runs as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError


@contextmanager
def evaluated(model: nn.Module, gathered: AbstractContextManager[None]) -> Iterator[None]:
    """While it is open, a model is whole and in evaluation mode, and no gradients are recorded; then, each of its
    modules is in the mode that it was in."""
    modes = [(m, m.training) for m in model.modules()]
    with gathered, torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def as_it_is(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The model's output. Where there are several ranks, a backward pass from it that gives the model's parameters
    gradients raises `CaptureError` as it ends: these would be each rank's own."""
    output = model(*args, **kwargs)
    if torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
        _Watch(model).over(output)
    return output


class _Watch:
    """Over the backward passes from one output."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: dict[str, tuple[int, int]] | None = None
        """The gradients that were there as a backward pass began; `None` outside of one."""

    def over(self, output: Any) -> None:
        for value in pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: torch.Tensor) -> None:
        if self.before is None:
            self.before = self._gradients()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        before, self.before = self.before, None
        now = self._gradients()
        changed = [name for name in now if now[name] != (before or {}).get(name)]
        if changed:
            raise CaptureError(
                f"a backward pass in evaluation mode gave '{changed[0]}' a gradient that is this rank's own: models "
                "are synchronized in training mode. To train with layers in evaluation mode, call .train() on the "
                "module, then .eval() on those layers. Where its gradients are not to be used, freeze the parameters, "
                "or call the model itself (module.module)"
            )

    def _gradients(self) -> dict[str, tuple[int, int]]:
        """Which tensor each parameter's gradient is, and how often it was written to."""
        found = ((n, p.grad) for n, p in self.model.named_parameters() if p.requires_grad)
        return {n: (id(g), g._version) for n, g in found if g is not None}
