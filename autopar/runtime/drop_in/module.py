"""A drop-in module: the model, with gradients synchronized during `backward()`, in the place of DDP."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import CaptureError
from autopar.runtime.checkpoints.checks import check_module
from autopar.runtime.drop_in.gradient_program import GradientProgram
from autopar.runtime.model.evaluated import as_it_is
from autopar.runtime.uncaptured.gradient_program import EagerGradientProgram
from autopar.spec.plan import Plan

PREFIX = "module."
"""What `DistributedDataParallel` puts before the names of a model's state."""
M = TypeVar("M", bound=nn.Module)


class SyncedModule(nn.Module):
    """The model, whose `backward()` leaves every rank the gradient of the mean over the global batch.

    Used like the model, and like `DistributedDataParallel`: `output = module(...)`, `loss.backward()`, and any
    optimizer. The module does not see the loss, so each rank's counts by the samples in its batch (dimension 0 of its
    first tensor), or as `weight` says: that is one process's gradient where the loss is a mean over samples. A batch of
    no samples counts as nothing, unless no rank's has any. Outside training mode, or without autograd, it is the model
    itself; on several ranks, a backward pass that gives its parameters gradients then raises `CaptureError`. Its state
    dict is the model's.
    """

    def __init__(self, program: GradientProgram | EagerGradientProgram) -> None:
        super().__init__()
        self.module = program.model
        self._program: GradientProgram | EagerGradientProgram | None = program
        self._original = program
        """Of a copy, the program of what it was copied from."""
        self.register_load_state_dict_pre_hook(as_it_was_saved)  # type: ignore[no-untyped-call]

    @property
    def program(self) -> GradientProgram | EagerGradientProgram:
        """What runs the model in training; a copy's is made when it is first asked for."""
        if self._program is None:
            self._program = self._original = self._original.of_copy(self.module)
        return self._program

    @property
    def plan(self) -> Plan:
        return (self._program or self._original).plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.module.training):
            if self._program is not None:
                self._program.statistics.tell_of_own()
            return as_it_is(self.module, args, kwargs)
        if DistributedDataParallel._active_ddp_module is not None:
            raise CaptureError(
                "the module runs within DistributedDataParallel, which would send every gradient a second time: use "
                "the result of optimize() in DDP's place"
            )
        return self.program.call(args, kwargs)

    def __copy__(self) -> SyncedModule:
        """The same module, with the same program."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _load_state_dict_pre_hooks=OrderedDict())
        made.register_load_state_dict_pre_hook(as_it_was_saved)  # type: ignore[no-untyped-call]
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncedModule:
        """A copy of the model under the same plan. Where it is trained, it synchronizes its own gradients, and all
        ranks must have one; copies that are not, as averages of weights, may be one rank's alone."""
        return copied(self, memo, {"_program": None, "_original": self._program or self._original})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `CaptureError`: nobody would synchronize the gradients of what is read back."""
        raise CaptureError(
            "a module of autopar cannot be pickled, as it holds connections to other ranks: save the model itself, "
            "module.module, or its state_dict(), and optimize what is loaded"
        )

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are synchronized, as loops set it that accumulate gradients without `no_sync()`."""
        return self.program.synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.program.synchronizes = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """What is called and passed back through within it leaves this rank's own gradients in the parameters' `grad`,
        as `DistributedDataParallel` does. The next `backward()` outside synchronizes what lies there then, with its
        own: what was changed there as it was changed, what `zero_grad()` has dropped not at all."""
        before, self.program.synchronizes = self.program.synchronizes, False
        try:
            yield
        finally:
            self.program.synchronizes = before

    def synchronize_buffers(self) -> None:
        """Averages floating-point buffers over the ranks; to be called by all ranks together."""
        self.program.synchronize_buffers()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own `state_dict()`, as one process would have it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads a `state_dict()` of the model, or what was saved of it within `DistributedDataParallel`. Raises
        `SpecError` where it does not fit, before anything is changed; `assign` is refused, as the program holds the
        tensors themselves."""
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the tensors that the program was made for")
        state_dict = as_of_the_model(self.module, state_dict)
        check_module("model", self.module, state_dict, strict, converts=True)
        return self.module.load_state_dict(state_dict, strict)


def as_of_the_model(model: nn.Module, state_dict: Any) -> Any:
    """A state dict of the model with its own names, where `DistributedDataParallel` has saved it."""
    if not isinstance(state_dict, Mapping):
        return state_dict
    own, of_ddp = ({f"{before}{name}" for name in model.state_dict()} for before in ("", PREFIX))
    if len(of_ddp & state_dict.keys()) <= len(own & state_dict.keys()):  # a model may have `x` and `module.x`
        return state_dict
    named = OrderedDict((str(name).removeprefix(PREFIX), value) for name, value in state_dict.items())
    if hasattr(state_dict, "_metadata"):  # the versions of modules, by name; DDP's own is before the model's
        of = {f"{name}.".removeprefix(PREFIX).removesuffix("."): one for name, one in state_dict._metadata.items()}
        named._metadata = of  # type: ignore[attr-defined]
    return named


def copied(of: M, memo: dict[int, Any], own: Mapping[str, Any]) -> M:
    """A deep copy of a module that holds what cannot be copied: `own` says what the copy has in its place, by name."""
    made = of.__new__(type(of))
    memo[id(of)] = made
    made.__dict__.update(copy.deepcopy({k: v for k, v in of.__dict__.items() if k not in own}, memo), **own)
    return made


def as_it_was_saved(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames the entries of the model in `module.module` to what PyTorch looks for, where a module that holds `module`
    loads its state dict: that has them without `module.`, as `module.state_dict()` has. Those that
    `DistributedDataParallel` has saved keep their names."""
    names = module.module.state_dict().keys()
    own, of_ddp = ({f"{prefix}{within}{name}" for name in names} for within in ("", "module."))
    if own & state_dict.keys() and not of_ddp <= state_dict.keys():  # a model may have `x` and `module.x`
        found = {name: state_dict.pop(name) for name in [*state_dict] if name.startswith(prefix)}
        state_dict.update({f"{prefix}module.{name.removeprefix(prefix)}": value for name, value in found.items()})
