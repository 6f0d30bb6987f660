"""Modules that are captured where they are called, in a step that runs as the Python that it is.

A LightningModule's `training_step` logs, updates metrics and looks at the Trainer, which no graph can hold. What takes
its time are calls of modules with parameters, `self(x)` or `self.model(x)`: each module that is called by the step
itself, rather than by another module, gets a plan and a captured forward and backward pass of its own. Parameters that
the step uses by itself have their gradients averaged after the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.api import optimize
from autopar.errors import SpecError
from autopar.integrations.buffers import SharedBuffers
from autopar.integrations.drop_in import by_keyword
from autopar.integrations.ranks import equal, make_equal, sums
from autopar.runtime.drop_in.module import SyncedModule
from autopar.spec.cluster import ClusterSpec


class CapturedCalls:
    """While entered, calls of `owner`, and of modules within, leave synchronized gradients when they are
    differentiated: the plain mean of all ranks' gradients. `finish` is called after each backward pass."""

    def __init__(self, owner: nn.Module, cluster: ClusterSpec | None, options: Mapping[str, Any]) -> None:
        """`options`: further arguments of `autopar.optimize`. By all ranks together: `owner` takes rank 0's values."""
        self._owner, self._cluster, self._options = owner, cluster, dict(options)
        self._units: dict[nn.Module, SyncedModule] = {}
        self._synchronizes = True
        self._modules = [m for m in owner.modules() if any(p.requires_grad for p in m.parameters())]
        if any(m._compiled_call_impl is not None for m in self._modules):
            raise SpecError(
                "a module was compiled with module.compile(): leave that out, and pass compile=True to the strategy, "
                "which compiles what autopar captures"
            )
        make_equal([*owner.parameters(), *owner.buffers()])
        self._buffers = SharedBuffers(owner, are_alike=True)

    @property
    def units(self) -> dict[str, SyncedModule]:
        """What was captured so far, by the module's name; "" is the owner itself."""
        return {name: self._units[m] for name, m in self._owner.named_modules() if m in self._units}

    def __enter__(self) -> None:
        for module in self._modules:
            vars(module)["_compiled_call_impl"] = functools.partial(self._call, module)

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            vars(module).pop("_compiled_call_impl", None)

    @property
    def synchronizes(self) -> bool:
        """Whether gradients of the next backward pass are synchronized."""
        return self._synchronizes

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients stay on this rank, to be synchronized with those of the next backward pass outside."""
        self._set_synchronizes(False)
        try:
            yield
        finally:
            self._set_synchronizes(True)

    def finish(self) -> None:
        """After a backward pass: averages the gradients of parameters that no captured module has."""
        if not self._synchronizes:
            return
        captured = {id(p) for unit in self._units.values() for p in _synchronized(unit).values()}
        strays = [p for p in self._owner.parameters() if p.requires_grad and id(p) not in captured]
        if not strays:
            return
        # A rank that did not use a parameter has no gradient of it; where none has one, it keeps none, as with DDP.
        found = sums([float(p.grad is not None) for p in strays], strays[0].device)
        for p, ranks in zip(strays, found, strict=True):
            if ranks:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                mean = p.grad.contiguous() / dist.get_world_size()
                dist.all_reduce(mean)
                p.grad.copy_(mean)

    def share_buffers(self) -> None:
        """Has all ranks take rank 0's buffers, running statistics among them, as `DistributedDataParallel` does. By all
        ranks together."""
        self._buffers.share()
        self._buffers.note_trained()  # as a step may write them by itself

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A call by the step itself: those within run as they are."""
        self.__exit__()
        try:
            if not (torch.is_grad_enabled() and module.training):
                return module(*args, **kwargs)
            args, kwargs = by_keyword(module, args, kwargs)
            if module not in self._units:
                self._units[module] = self._captured(module, kwargs or args)
            return self._units[module](*args, **kwargs)
        finally:
            self.__enter__()

    def _captured(self, module: nn.Module, inputs: Any) -> SyncedModule:
        options = {"unused_parameters": "freeze", **self._options}  # those that the step uses by itself are averaged
        made: SyncedModule = optimize(module, self._cluster, example_inputs=inputs, weight=equal, **options)
        made.program.use_pytorch_generator()
        made.program.synchronizes = self._synchronizes
        return made

    def _set_synchronizes(self, value: bool) -> None:
        self._synchronizes = value
        for unit in self._units.values():
            unit.program.synchronizes = value


def _synchronized(unit: SyncedModule) -> dict[str, nn.Parameter]:
    """The parameters whose gradients a captured module synchronizes."""
    named = dict(unit.module.named_parameters(remove_duplicate=False))
    return {p.name: named[p.name] for p in unit.plan.model.parameters if p.trainable}
