"""What of a model's tensors and hooks must stay as it was when its program was made, and is looked at before each step.

DDP sees the model anew in each step. A program has the parameters, the tensors behind them and the set of those that
are trained written into its plan; so what would make it compute something else is refused, by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from itertools import product

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import OptimizerError, PlanMismatchError
from autopar.runtime.model.shared_memory import is_spread
from autopar.runtime.model.tables import table_of
from autopar.runtime.model.tree import ModuleTree
from autopar.runtime.optimizers.joint_optimizer import each_of

_AGAIN = "Call autopar.optimize again, with the model as it is now"
_AND_OPTIMIZER = ", and with an optimizer of its parameters"


class Unchanged:
    """A model's parameters, buffers and hooks, as they are when this is made."""

    def __init__(
        self,
        owners: Mapping[str, nn.Module],
        buffers: MutableMapping[str, torch.Tensor],
        optimizer: Optimizer | None = None,
        eager: bool = False,
        kept: Collection[str] = (),
    ) -> None:
        """`owners`: the model, and the loss where it is a module, by what their names begin with. `buffers`: the table
        of buffers that the program runs on, in which those are replaced that the model replaces. `optimizer`: where
        the program runs it, and gradients are not left on the parameters. `eager`: whether the model itself runs in
        each step, and the hooks on its gradients with it; its parameters may then be frozen for a while, but for
        those that are `kept`, by their names: they would move all the same."""
        self._owners = owners
        self._tree = ModuleTree(owners)
        self._buffers = buffers
        self._optimizer = optimizer
        self._eager, self._kept = eager, kept
        self._optimizers = () if optimizer is None else each_of(optimizer)
        self._parameters: list[
            tuple[dict[str, nn.Parameter | None], str, nn.Parameter, bool | None, torch.dtype, bool, str]
        ] = []
        """Where each is held, whether it is trained (`None`: elsewhere, by another program), its dtype, whether it is
        on a GPU, and its name."""
        self._held: list[tuple[dict[str, torch.Tensor | None], str, str]] = []
        held = None if optimizer is None else {p for g in optimizer.param_groups for p in g["params"]}
        for prefix, owner in owners.items():
            for path, module in owner.named_modules(remove_duplicate=False):
                start = prefix + (path + "." if path else "")
                for key, p in module._parameters.items():
                    if p is not None:
                        trains = None if p.requires_grad and held is not None and p not in held else p.requires_grad
                        table = table_of(module._parameters)
                        self._parameters.append((table, key, p, trains, p.dtype, p.is_cuda, start + key))
                for key, b in module._buffers.items():
                    if b is not None and start + key in buffers:
                        self._held.append((table_of(module._buffers), key, start + key))
        self._refuse_hooks()

    def check(self) -> None:
        """Raises `PlanMismatchError` or `OptimizerError`, with the name, where something is other than it was. Buffers
        that the model has replaced are taken over."""
        hooks = self._optimizer is not None
        for table, key, p, trains, dtype, on_gpu, name in self._parameters:
            if table.get(key) is not p or (p.requires_grad is not trains and not self._may_be_frozen(p, trains, name)):
                raise PlanMismatchError(self._parameter_changed(table.get(key), p, name))
            if hooks and (p._post_accumulate_grad_hooks or p._backward_hooks) and self._is_hooked(p):
                self._refuse_hooks()
            if p.dtype is not dtype or p.is_cuda is not on_gpu:  # as `model.to()` makes it, in place
                before, now = f"{dtype} on {'cuda' if on_gpu else 'cpu'}", f"{p.dtype} on {p.device}"
                raise PlanMismatchError(
                    f"parameter '{name}' was {before} when the plan was made, and is {now} now. "
                    f"{_AGAIN}{_AND_OPTIMIZER if hooks else ''}"
                )
        if (strange := self._tree.strange()) is not None:
            raise PlanMismatchError(f"{strange}: it is in no plan. {_AGAIN}{_AND_OPTIMIZER}")
        for held, key, name in self._held:
            buffer, mine = held.get(key), self._buffers[name]
            if buffer is not mine:
                self._take_over(name, buffer, mine)
        if any(
            o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks or "step" in vars(o) for o in self._optimizers
        ):
            self._refuse_hooks()

    def know_buffer(self, name: str) -> None:
        """Takes a buffer in that was registered later, and that a new capture reads."""
        prefix = max((p for p in self._owners if name.startswith(p)), key=len)
        path, _, key = name.removeprefix(prefix).rpartition(".")
        table = self._owners[prefix].get_submodule(path)._buffers
        buffer = table[key]
        assert buffer is not None, "a graph reads buffers that are there"
        self._buffers[name] = buffer
        self._held.append((table_of(table), key, name))

    def _may_be_frozen(self, p: nn.Parameter, trains: bool | None, name: str) -> bool:
        """Whether a parameter may require a gradient otherwise than it did: one that is trained elsewhere; and, run
        eagerly, one that is frozen for a while, and has no gradient meanwhile."""
        return trains is None or (self._eager and trains and not p.requires_grad and name not in self._kept)

    def _parameter_changed(self, now: nn.Parameter | None, p: nn.Parameter, name: str) -> str:
        if now is not p:
            return f"parameter '{name}' was replaced by another tensor, or removed, which is in no plan. {_AGAIN}"
        if p.requires_grad:
            return f"parameter '{name}' was frozen when the plan was made, and trains now: it is in no plan. {_AGAIN}"
        said = f"parameter '{name}' was trained when the plan was made, and is frozen now"
        if self._optimizer is None:
            return (
                f"{said}. All parameters of a drop-in module may be frozen for a while, some of them with "
                "capture='never'; else call autopar.optimize again, with the model as it is now"
            )
        again = f"{_AGAIN}, or pass capture='never', which lets parameters be frozen for a while"
        if name in self._kept:
            again = (
                "Its group keeps something of earlier steps (a residual, late gradients, an outer momentum), which "
                f"would move it all the same. {_AGAIN}, or pin the parameter to an exact strategy"
            )
        if is_spread(p):
            again = (
                "Its rows are spread over the ranks: load program.state_dict()['model'] into a new model, freeze it "
                "there, call autopar.optimize with that, and load_state_dict"
            )
        return f"{said}. {again}"

    def _is_hooked(self, p: nn.Parameter) -> bool:
        """Whether a parameter has a hook that a step would not call, or call out of turn."""
        return bool(p._post_accumulate_grad_hooks or (p._backward_hooks and not self._eager))

    def _take_over(self, name: str, buffer: torch.Tensor | None, mine: torch.Tensor) -> None:
        if buffer is None and self._eager:
            return  # until the model sets it again
        fits = self._eager or (
            buffer is not None and (buffer.shape, buffer.dtype, buffer.device) == (mine.shape, mine.dtype, mine.device)
        )
        if buffer is None or not fits:
            found = "nothing" if buffer is None else f"{tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
            raise PlanMismatchError(
                f"buffer '{name}' was replaced by one that the captured step does not fit: {found} in place of "
                f"{tuple(mine.shape)} {mine.dtype} on {mine.device}. {_AGAIN}"
            )
        self._buffers[name] = buffer

    def _refuse_hooks(self) -> None:
        if self._optimizer is None:
            return
        for _, _, p, _, _, _, name in self._parameters:
            if self._is_hooked(p):
                raise OptimizerError(
                    f"parameter '{name}' has a hook on its gradient, which a step that runs as one program would not "
                    "call: remove it, or leave the optimizer out of optimize() and step it yourself, where hooks run"
                )
        for one, when in product(self._optimizers, ("pre", "post")):
            if getattr(one, f"_optimizer_step_{when}_hooks"):
                raise OptimizerError(
                    f"the optimizer has a step {when}-hook, which a step that runs as one program would not call: "
                    "remove it and call what it does around program.step(), or leave the optimizer out of optimize()"
                )
        if any(map(_is_wrapped, self._optimizers)):
            raise OptimizerError(
                "the optimizer's step() was replaced by another function, which a step that runs as one program would "
                "not call: call what it does around program.step(), override step() in a class of your own, or leave "
                "the optimizer out of optimize()"
            )


def _is_wrapped(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` is not its class's; a learning-rate scheduler's wrapper, which only counts, is."""
    own = vars(optimizer).get("step")
    function = getattr(own, "__func__", own)
    if getattr(function, "_wrapped_by_lr_sched", False):
        function = getattr(function, "__wrapped__", None)
    return function is not None and function is not type(optimizer).step
