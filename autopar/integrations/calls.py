"""Modules that are captured where they are called, in a step that runs as the Python that it is.

A LightningModule's `training_step` logs, updates metrics and looks at the Trainer, which no graph can hold. What takes
its time are calls of modules with parameters, `self(x)` or `self.model(x)`: each module that is called by the step
itself, rather than by another module, gets a plan and a captured forward and backward pass of its own. Parameters that
the step uses by itself, or whose module is called in evaluation mode, have their gradients averaged after the backward
pass; so have those whose captured module a backward pass does not come to, which may hold gradients of earlier ones.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.api import optimize
from autopar.errors import SpecError
from autopar.integrations.buffers import SharedBuffers
from autopar.integrations.drop_in import by_keyword, shown
from autopar.integrations.ranks import as_patient, equal, make_equal, sums
from autopar.runtime.drop_in.module import SyncedModule
from autopar.runtime.drop_in.passes import without_hooks_on_saved_tensors
from autopar.spec.cluster import ClusterSpec


class CapturedCalls:
    """While entered, calls of `owner`, and of modules within, leave synchronized gradients when they are
    differentiated: the plain mean of all ranks' gradients. `finish` is called after each backward pass."""

    def __init__(self, owner: nn.Module, cluster: ClusterSpec | None, options: Mapping[str, Any]) -> None:
        """`options`: further arguments of `autopar.optimize`. By all ranks together: `owner` takes rank 0's values."""
        self._owner, self._cluster, self._options = owner, cluster, dict(options)
        self._units: dict[nn.Module, SyncedModule] = {}
        self._synchronizes = True
        self._dtype = torch.get_default_dtype()
        self._is_entered = False
        self._is_within_step = True
        """Whether it was entered for the step; else for a backward pass alone."""
        self._passes: dict[nn.Module, int] = {}
        """By module, how many synchronizing backward passes its capture had run before the one under way."""
        self._alike: dict[int, tuple[Callable[[], torch.Tensor | None], int]] = {}
        """By parameter, the `grad` that was alike on all ranks after a backward pass, and its version."""
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
        self._is_entered = True
        for module in self._modules:
            vars(module)["_compiled_call_impl"] = functools.partial(self._call, module)

    def __exit__(self, *_: object) -> None:
        self._is_entered = False
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

    @contextlib.contextmanager
    def passing_back(self) -> Iterator[None]:
        """Around a backward pass and `finish`. A checkpoint in the step calls modules again within it: those that were
        captured run as captured again, as it compares what they save."""
        self._passes = {module: unit.program._steps for module, unit in self._units.items()}
        if self._is_entered:  # by a step that calls `manual_backward`
            yield
            return
        self._is_within_step = False
        self.__enter__()
        try:
            yield
        finally:
            self.__exit__()
            self._is_within_step = True

    def finish(self) -> None:
        """After a backward pass: averages the gradients that no captured module has synchronized in it."""
        if not self._synchronizes:
            return
        ran = [unit for module, unit in self._units.items() if unit.program._steps != self._passes.get(module)]
        captured = {id(p) for unit in ran for p in _synchronized(unit).values()}
        trained = [p for p in self._owner.parameters() if p.requires_grad]
        self._average([p for p in trained if id(p) not in captured])
        self._alike = {id(p): (weakref.ref(p.grad), p.grad._version) for p in trained if p.grad is not None}

    def _average(self, strays: list[nn.Parameter]) -> None:
        if not strays:
            return
        # A rank that did not use a parameter has no gradient of it; where none has one, it keeps none, as with DDP.
        found = sums([float(not self._is_alike(p)) for p in strays], strays[0].device)
        for p, ranks in zip(strays, found, strict=True):
            if ranks:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                mean = p.grad.contiguous() / dist.get_world_size()
                dist.all_reduce(mean)
                p.grad.copy_(mean)

    def _is_alike(self, p: nn.Parameter) -> bool:
        """Whether all ranks have the same gradient of a parameter, or none."""
        lies, version = self._alike.get(id(p), (None, -1))
        return p.grad is None or (lies is not None and lies() is p.grad and p.grad._version == version)

    def share_buffers(self) -> None:
        """Has all ranks take rank 0's buffers, running statistics among them, as `DistributedDataParallel` does. By all
        ranks together."""
        self._buffers.share()
        self._buffers.note_trained()  # as a step may write them by itself

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A call by the step itself: those within run as they are."""
        self.__exit__()
        try:
            is_again = torch._C._current_graph_task_id() != -1  # for a checkpoint, within a backward pass
            runs_as_it_is = module not in self._units if is_again else not self._is_within_step
            if runs_as_it_is or not (torch.is_grad_enabled() and module.training):
                return module(*args, **kwargs)
            args, kwargs = by_keyword(module, args, kwargs)
            if not is_again:
                self._dtype = torch.get_default_dtype()
                self._capture(module, args, kwargs)
            with _default_dtype(self._dtype):  # Lightning sets it for the step alone, and a capture is made for one
                return self._units[module](*args, **kwargs)
        finally:
            self.__enter__()

    def _capture(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures a module, unless that was done; where a checkpoint around the call counts what is saved, for each
        new shape, too, before it counts."""
        is_new = module not in self._units
        with without_hooks_on_saved_tensors():
            if is_new:
                with shown(module, args, kwargs) as inputs:
                    self._units[module] = self._captured(module, inputs)
            elif torch._C._autograd._top_saved_tensors_default_hooks(False) is not None and not args:
                self._units[module].program.compile_for(kwargs)

    def _captured(self, module: nn.Module, inputs: Any) -> SyncedModule:
        options = {
            "unused_parameters": "freeze",
            **as_patient(self._options),
        }  # those that the step uses by itself are averaged
        made: SyncedModule = optimize(module, self._cluster, example_inputs=inputs, weight=equal, **options)
        made.program.use_pytorch_generator()
        made.program.synchronizes = self._synchronizes
        return made

    def _set_synchronizes(self, value: bool) -> None:
        self._synchronizes = value
        for unit in self._units.values():
            unit.program.synchronizes = value


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _synchronized(unit: SyncedModule) -> dict[str, nn.Parameter]:
    """The parameters whose gradients a captured module synchronizes."""
    named = dict(unit.module.named_parameters(remove_duplicate=False))
    return {p.name: named[p.name] for p in unit.plan.model.parameters if p.trainable}
