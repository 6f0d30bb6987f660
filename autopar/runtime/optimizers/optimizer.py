"""The user's optimizer, run on the parts of the parameters that this rank updates.

Each sync group gets a part of the optimizer: the same class and settings, over the group's fragments. Settings are
read from the user's optimizer at every step, so learning-rate schedulers work on it as on any optimizer. Where this
rank updates whole parameters, the state lives in the user's optimizer itself; `autopar.runtime.optimizers.parts`
sees to it that what the user does to it there is done.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import OptimizerError
from autopar.ir.dtypes import EXACT_BYTES
from autopar.ops.context import Context
from autopar.ops.fragments import Formed, Fragment
from autopar.runtime.optimizers import kinds
from autopar.runtime.optimizers.frozen_adam import step_frozen
from autopar.runtime.optimizers.initial_state import initial_state
from autopar.runtime.optimizers.joint_optimizer import JointOptimizer, each_of
from autopar.runtime.optimizers.layout import is_dense, lay_as
from autopar.runtime.optimizers.own_settings import OwnSettings, bare_copy

ELEMENTWISE = frozenset(
    getattr(torch.optim, n)
    for n in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"]
)
"""Optimizers that update each element from that element's gradient and state alone."""

_FUSED_ON_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

Scope = Literal["element", "parameter"]
"""The smallest unit whose update depends on nothing else."""


def optimizer_scope(optimizer: Optimizer | None, stated: Scope | None = None) -> Scope:
    """What unit the optimizer acts on; raises `OptimizerError` where that is neither known nor stated."""
    if optimizer is not None:
        refuse_nested(optimizer)
    if stated is not None:
        return stated
    if isinstance(optimizer, JointOptimizer):
        return "element" if all(optimizer_scope(o) == "element" for o in optimizer.each) else "parameter"
    if optimizer is None or type(optimizer) in ELEMENTWISE:
        return "element"
    if type(optimizer).__module__.startswith("torch.optim"):
        return "parameter"
    raise OptimizerError(
        f"{type(optimizer).__name__} is not one of PyTorch's own, so it is not known whether its update may run on one "
        'parameter, or one slice, at a time: pass optimizer_acts_on="element" or "parameter", whichever is the '
        "smallest unit whose update depends on nothing else"
    )


def refuse_nested(optimizer: Optimizer) -> None:
    """Raises `OptimizerError` where an optimizer holds another one: a program runs it once for each part of the
    parameters, and keeps its state, where the other's steps and state are for all of them."""
    for one in each_of(optimizer):
        for name, value in vars(one).items():
            held = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            )
            inner = next((o for o in held if isinstance(o, Optimizer) and o is not one), None)
            if inner is not None:
                kind = type(one).__name__
                raise OptimizerError(
                    f"{kind} holds another optimizer, {type(inner).__name__}, as '{name}', whose state a program would "
                    f"neither divide among ranks nor save. Have {kind} do that update itself, as a subclass of "
                    f"{type(inner).__name__}, or leave the optimizer out of optimize() and step it yourself"
                )


def context_for(
    world_size: int,
    optimizer: Optimizer | None,
    scope: Scope,
    clip_grad_norm: float | None,
    updates: bool,
    late_parameters: bool = False,
    is_scaled: bool = False,
) -> Context:
    """What strategies may depend on. `updates`: whether the program runs the optimizer, which need not be known yet.
    `is_scaled`: whether the loss is, so that all gradients are looked at before the first is updated with."""
    return Context(
        world_size,
        has_optimizer=updates,
        elementwise_update=scope == "element",
        clips=clip_grad_norm is not None or is_scaled,
        sparse_update=kinds.leaves_zeros_alone(optimizer),
        keeps_moments=kinds.keeps_moments(optimizer),
        plain_sgd=kinds.is_plain_sgd(optimizer),
        plain_adam=kinds.is_plain_adam(optimizer),
        variance_steps=kinds.variance_steps(optimizer),
        late_parameters=late_parameters and updates,
    )


def check_optimizer(optimizer: Optimizer, parameters: dict[str, nn.Parameter], may_leave: bool = False) -> None:
    """Raises `OptimizerError` unless the optimizer updates exactly this model's trainable parameters; with `may_leave`,
    some of them."""
    each = each_of(optimizer)
    if any(isinstance(o, torch.optim.LBFGS) for o in each):
        raise OptimizerError(
            "LBFGS evaluates the loss several times a step, through a closure: its step cannot be one program. Use "
            "optimize(model, cluster) without an optimizer and step it yourself"
        )
    if any(isinstance(o, torch.optim.SparseAdam) for o in each):
        raise OptimizerError(
            "SparseAdam takes sparse gradients alone, and leaves rows that were not looked up as they are; a program's "
            "gradients are dense. Use Adagrad or SGD, which treat rows that nobody has looked up alike; or, where "
            "other rows' momenta must stay, optimize(model) without an optimizer, and give SparseAdam the rows that "
            "are not zero before its step: table.weight.grad = table.weight.grad.to_sparse(1)"
        )
    known = {p: n for n, p in reversed(parameters.items())}
    held = {p for g in optimizer.param_groups for p in g["params"]}
    strangers = [p for p in held if p not in known]
    if strangers:
        raise OptimizerError(
            f"{len(strangers)} of the optimizer's {len(held)} parameters are not the model's (the first has shape "
            f"{tuple(strangers[0].shape)}): build the optimizer from this model's parameters(), after any change "
            "that replaces them (.to(), tying, wrapping)"
        )
    missing = [n for n, p in parameters.items() if p.requires_grad and p not in held]
    if missing and not may_leave:
        raise OptimizerError(
            f"the optimizer does not update {len(missing)} trainable parameter(s), the first is '{missing[0]}': add "
            "them, or freeze them with requires_grad_(False). Where another program trains them, as a GAN's "
            'discriminator, pass unused_parameters="freeze"'
        )


def updated_by(optimizer: Optimizer | None) -> set[nn.Parameter] | None:
    """The parameters that an optimizer holds; `None` where there is none yet, and all are trained."""
    return None if optimizer is None else {p for g in optimizer.param_groups for p in g["params"]}


def described(optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> str:
    """The optimizer in words, with its settings and which parameters they are for: to be compared between ranks."""
    if optimizer is None:
        return "no optimizer"
    names = {p: n for n, p in reversed(list(parameters.items()))}
    groups = []
    for group in optimizer.param_groups:
        settings = ", ".join(f"{k!r}: {shown(v)}" for k, v in group.items() if k != "params")
        held = hashlib.sha256("\n".join(names[p] for p in group["params"]).encode()).hexdigest()[:8]
        groups.append(f"{{{settings}}} for the parameters {held}")
    kind = " and ".join(type(o).__name__ for o in each_of(optimizer))
    return f"{kind} as optimizer with {'; '.join(groups)}"


def shown(setting: Any) -> str:
    """A setting of an optimizer in words, which are the same on all ranks where it is: a tensor's numbers, and of an
    object not where it lies in memory."""
    if isinstance(setting, torch.Tensor):
        return repr(setting.item() if setting.numel() == 1 else setting.tolist())
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(setting))


class OptimizerPart:
    """The optimizer over some fragments: `step(gradients)` updates them in place."""

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Sequence[Fragment],
        parameters: dict[str, nn.Parameter],
        unused: Callable[[], frozenset[str]] = frozenset,
        own: OwnSettings | None = None,
    ) -> None:
        """`unused`: parameters that have no gradient in this step, and are left as they are. `own`: what all parts of
        this optimizer share."""
        self._unused = unused
        self._own = OwnSettings(optimizer) if own is None else own
        self.fragments = tuple(parts)
        self._whole = optimizer
        self._looked = False
        self._part = bare_copy(optimizer)
        self._leaves = [f.tensor if f.whole else nn.Parameter(f.tensor.detach()) for f in parts]
        of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        for fragment, leaf in zip(self.fragments, self._leaves, strict=True):
            self._part.param_groups[of[parameters[fragment.name]]]["params"].append(leaf)
        self._wholes = [leaf for leaf, fragment in zip(self._leaves, parts, strict=True) if fragment.whole]
        self._known: list[Any] = []
        """The state of each of these, as the user's optimizer has it."""
        self._count = 0
        """Of states that are there."""
        self._strides: list[tuple[int, ...]] = []
        """Of the leaves, when their states last were laid as they lie; none where a state was set since."""
        self.has_written = True
        """Whether there are other states, as objects, since this was set to be false."""

    @property
    def each(self) -> list[tuple[OptimizerPart, int]]:
        """Of each fragment, its part and its place there."""
        return [(self, i) for i in range(len(self.fragments))]

    def step(self, gradients: Sequence[Formed | None]) -> None:
        """Updates the fragments from gradients in their shapes: all at once, but those that are still to be formed one
        after the other."""
        if unused := self._unused():
            gradients = [None if f.name in unused else g for f, g in zip(self.fragments, gradients, strict=True)]
        for leaf in self._leaves:
            leaf.grad = None  # where the user's own backward pass has left one, or an update that has failed
        formed = [isinstance(g, torch.Tensor) for g in gradients]
        known = [g for g in gradients if isinstance(g, torch.Tensor)]
        sparse = any(g.is_sparse for g in known)
        for mine, whole in zip(self._part.param_groups, self._whole.param_groups, strict=True):
            for key, value in whole.items():
                if key != "params":
                    mine[key] = value
            if may_fuse(self._part, mine) and not sparse and not self._begins_late(mine, formed):
                mine["fused"] = True
        without_wrong_kernels(self._part)
        if (strides := [leaf.stride() for leaf in self._leaves]) != self._strides:
            for leaf in self._leaves:
                lay_as(leaf, self._part.state.get(leaf, {}))
            self._strides = strides
        if sparse and not kinds.leaves_zeros_alone(self._whole):  # set since it was planned for
            known = [g.to_dense() for g in known]
        self._apply([leaf for leaf, there in zip(self._leaves, formed, strict=True) if there], known)
        for leaf, gradient in zip(self._leaves, gradients, strict=True):
            if not isinstance(gradient, torch.Tensor) and gradient is not None:
                self._apply([leaf], [gradient()])
        if not self._looked:
            for fragment, leaf in zip(self.fragments, self._leaves, strict=True):
                if not fragment.whole:
                    self._check_elementwise(leaf)
        self._looked = True
        if not self._knows(now := self._now()):
            for leaf, state in zip(self._wholes, now, strict=True):
                _set(self._whole.state, leaf, state)
            self._known, self.has_written = now, True
        if len(self._part.state) != self._count:
            self._count, self.has_written = len(self._part.state), True

    def _begins_late(self, group: dict[str, Any], formed: Sequence[bool]) -> bool:
        """Whether some parameters of a group get their first gradient after others did, for which PyTorch's fused SGD
        with momentum fails."""
        if type(self._part) is not torch.optim.SGD or not group["momentum"]:
            return False
        own, state = set(map(id, group["params"])), self._part.state
        given = [leaf for leaf, there in zip(self._leaves, formed, strict=True) if there and id(leaf) in own]
        return len({state.get(leaf, {}).get("momentum_buffer") is None for leaf in given}) > 1

    def _check_elementwise(self, leaf: torch.Tensor) -> None:
        """Raises `OptimizerError` where the state of a part of a parameter shows that elements depend on each other."""
        for key, value in self._part.state.get(leaf, {}).items():
            if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter):
                raise OptimizerError(
                    f"{type(self._whole).__name__} keeps '{key}' as {type(value).__name__}, which quantizes elements "
                    'together: its update cannot run on slices. Pass optimizer_acts_on="parameter"'
                )

    def _apply(self, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        if not leaves:
            return
        strided = self._made_dense(leaves)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            # Fused kernels read gradients in the parameter's layout, as autograd would leave them; and kernels of some
            # versions return gradients of 16-bit parameters in 32 (recurrent layers', PyTorch 2.11).
            fits = gradient.is_sparse or (gradient.stride(), gradient.dtype) == (leaf.stride(), leaf.dtype)
            leaf.grad = gradient if fits else torch.empty_like(leaf).copy_(gradient)
        self._own.step(self._part)
        for leaf in leaves:
            leaf.grad = None
        for leaf, memory in strided:
            memory.copy_(leaf.data)
            leaf.data = memory

    def _made_dense(self, leaves: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gives dense memory to the leaves that the user's `fused=True` is for, until they are updated: PyTorch's fused
        kernels walk over strided memory as if it were dense. Returns these leaves, each with its own memory."""
        if all(leaf.is_contiguous() for leaf in leaves):  # as mostly
            return []
        fused = {id(p) for g in self._part.param_groups if g.get("fused") for p in g["params"]}
        found = [(leaf, leaf.data) for leaf in leaves if id(leaf) in fused and not is_dense(leaf)]
        for leaf, memory in found:
            leaf.data = torch.empty_like(memory).copy_(memory)  # as its state lies
        return found

    def state(self) -> list[tuple[Fragment, dict[str, Any]]]:
        """The optimizer state of each fragment."""
        return [(f, self._part.state.get(leaf, {})) for f, leaf in zip(self.fragments, self._leaves, strict=True)]

    def settings(self) -> list[Mapping[str, Any]]:
        """Of each fragment: those of its parameter group, as they are now."""
        groups = zip(self._part.param_groups, self._whole.param_groups, strict=True)
        of = {id(leaf): whole for mine, whole in groups for leaf in mine["params"]}
        is_adamw = isinstance(self._whole, torch.optim.AdamW)
        return [{"decoupled_weight_decay": is_adamw, **of[id(leaf)]} for leaf in self._leaves]

    def step_frozen(self, momenta: Sequence[torch.Tensor]) -> None:
        """Updates each fragment with a momentum, which becomes its own, and leaves its variance as it is: of Adam and
        AdamW alone."""
        settings = self.settings()
        for i, (leaf, own) in enumerate(zip(self._leaves, settings, strict=True)):
            if not self._part.state.get(leaf):
                self.load_state(i, initial_state(self._whole, dict(own), leaf))
        if self._leaves:
            step_frozen(self._leaves, [state for _, state in self.state()], settings, momenta)

    def kept_state(self) -> Callable[[], None]:
        """Keeps the state as it is; what is returned puts it back, into the memory where it was."""
        kept = [_kept(self._part.state.get(leaf)) for leaf in self._leaves]

        def put_back() -> None:
            for index, state in enumerate(kept):
                self.load_state(index, state())

        return put_back

    def take_state(self, index: int, state: dict[str, Any] | None) -> None:
        """Sets the state of one fragment, `None` where it has none, which the user's optimizer has for it."""
        _set(self._part.state, self._leaves[index], state)
        self._known, self._strides = [], []

    def load_state(self, index: int, state: dict[str, Any] | None) -> None:
        """Sets the optimizer state of one fragment, `None` where it has none."""
        _set(self._part.state, leaf := self._leaves[index], state)
        self._strides = []
        if self.fragments[index].whole:
            _set(self._whole.state, leaf, state)
            self._known, self.has_written = [], True

    def _now(self) -> list[Any]:
        return list(map(self._part.state.get, self._wholes))

    def _knows(self, states: Sequence[Any]) -> bool:
        return len(states) == len(self._known) and all(map(is_, states, self._known))


def _set(of: Any, leaf: torch.Tensor, state: dict[str, Any] | None) -> None:
    if state is None:
        of.pop(leaf, None)
    else:
        of[leaf] = state


def _kept(state: dict[str, Any] | None) -> Callable[[], dict[str, Any] | None]:
    """Keeps a parameter's state; what is returned is the same object, with what it held then. Tensors hold it where
    they are, as the user may have hold of them."""
    if state is None:
        return lambda: None
    values = {k: (v, copy.deepcopy(v)) for k, v in state.items()}

    def put_back() -> dict[str, Any]:
        state.clear()
        for key, (value, before) in values.items():
            if type(value) is torch.Tensor:
                with torch.no_grad():
                    state[key] = value.copy_(before)
            else:
                state[key] = copy.deepcopy(before)
        return state

    return put_back


def without_wrong_kernels(optimizer: Optimizer) -> None:
    """Switches fused implementations off for groups of parameters for which PyTorch's compute something else."""
    if isinstance(optimizer, JointOptimizer):
        for one in optimizer.each:
            without_wrong_kernels(one)
        return
    for group in optimizer.param_groups:
        if group.get("fused") and _fuses_wrongly(optimizer, group):
            group["fused"] = False


def may_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Where the user left the implementation open, PyTorch's fused one serves the CPU too, several times faster."""
    return (
        type(optimizer) in _FUSED_ON_CPU
        and group.get("fused") is None
        and group.get("foreach") is None
        # In 16 bits the fused one keeps squares that the others round to nothing: other numbers than the user's own.
        and all(p.dtype.itemsize >= EXACT_BYTES for p in group["params"])
        and not group.get("differentiable", False)
        and not group.get("capturable", False)
        and not isinstance(group.get("lr"), torch.Tensor)
        and bool(group["params"])
        and all(p.device.type == "cpu" and p.is_contiguous() and p.is_floating_point() for p in group["params"])
        and not _fuses_wrongly(optimizer, group)
    )


def _fuses_wrongly(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether PyTorch's fused implementation on CPUs would compute something else. [Empirical, torch 2.13: SGD leaves
    the vectorized part of 16-bit parameters as it is]"""
    narrow = (p.device.type == "cpu" and p.dtype.itemsize < EXACT_BYTES for p in group["params"])
    return type(optimizer) is torch.optim.SGD and any(narrow)
