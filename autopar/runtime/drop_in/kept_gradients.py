"""Gradients of backward passes within `no_sync()`: they lie in `grad` until a later backward pass synchronizes them.

As with `DistributedDataParallel`, users may look at them there, change them, or drop them with `zero_grad()`: what lies
there is what is synchronized. How much each backward pass counts does not show there, and is remembered here. What
others have left there, a backward pass that does not go through the module, say, is synchronized as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from autopar.errors import CaptureError
from autopar.runtime.model.gradient_layout import laid_out


@dataclass(frozen=True)
class Kept:
    """What this rank has kept back."""

    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By parameter, the sum of its gradients, each multiplied with the weight of its backward pass."""
    weight: float = 0.0
    """The sum of the weights of the backward passes."""
    passes: int = 0

    def sums_of(self, parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What a backward pass takes of it, by its parameters; nothing where nothing was kept back."""
        return [self.sums.get(n, torch.zeros_like(p)) for n, p in parameters.items()] if self.sums else []


class _InGrad:
    """What lies in one parameter's `grad`: the plain sum of its kept gradients, and of what others have added."""

    def __init__(self, others: torch.Tensor | None) -> None:
        self.others = others
        """The part that is none of the module's: it lay there before, or came with a backward pass from elsewhere."""
        self.excess: torch.Tensor | None = None
        """The sum of the gradients, each multiplied with what its backward pass weighs more than the first one."""
        self.is_unclear = False
        """Whether the user has changed `grad` since `others` or `excess` were worked out."""
        self._lies: Callable[[], torch.Tensor | None] = lambda: None
        self._version = -1

    def note(self, gradient: torch.Tensor) -> None:
        """Remembers `grad` as it is now."""
        self._lies, self._version = weakref.ref(gradient), gradient._version

    def is_dropped(self, gradient: torch.Tensor | None) -> bool:
        """Whether the user has dropped what was kept, as `zero_grad()` does."""
        if gradient is None:
            return True
        if self._lies() is gradient and self._version == gradient._version:
            return False
        self.is_unclear |= self.excess is not None or self.others is not None
        return not bool(gradient.any())


class _Listener(partial):  # type: ignore[type-arg]
    """A hook on a parameter, which is not the user's: another module that has the parameter leaves it there."""


@dataclass
class _Coming:
    """A parameter's gradient on its way to `grad`, in the backward pass under way."""

    before: torch.Tensor | None
    """What lies in `grad`."""
    version: int
    own: torch.Tensor | None = None
    """What comes from the module, until it is seen on its way."""
    others: torch.Tensor | None = None
    excess: torch.Tensor | None = None
    is_certain: bool = False
    """Whether the module has a gradient of it, which comes unless `torch.autograd.grad` was called."""

    def add(self, gradient: torch.Tensor, excess: float) -> None:
        """`excess`: how much more than the first kept backward pass this one counts."""
        self.is_certain = True
        self.own = _added(self.own, gradient)
        if excess:
            self.excess = _added(self.excess, gradient * excess)


class KeptGradients:
    """The gradients that one drop-in module keeps back on this rank."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: by name."""
        self._parameters = parameters
        self._in_grad: dict[str, _InGrad] = {}
        self._unit = 0.0
        """The weight of the first backward pass that counts."""
        self._weight, self._passes = 0.0, 0
        self._task = -1
        self._coming: dict[str, _Coming] = {}
        self._weights: list[float] = []
        """Of those of the module's calls that the backward pass under way has come through."""
        self._put_off: list[tuple[dict[int, Any], dict[int, Any]]] = []
        """Tables of hooks, and what the user has put into each."""
        self._listeners: list[Any] = []
        """Hooks of this object's."""
        self._staying: set[str] = set()
        """Parameters that the last synchronized backward pass left out, with what lies in their `grad`."""
        self._synchronized: dict[str, tuple[Callable[[], torch.Tensor | None], int]] = {}
        """By parameter, the `grad` that a synchronized backward pass has left, and its version."""

    @property
    def passes(self) -> int:
        """How many backward passes were kept back, and not dropped since."""
        self._look()
        return self._passes

    def expect(self, gradients: Mapping[str, torch.Tensor | None], weight: float) -> None:
        """Within a backward pass, whose gradients autograd is about to add to `grad`; `weight`: how much it counts.
        Hooks on the parameters are put off: they will see the synchronized gradients, of all passes. The gradients of
        a batch that counts as nothing are to be `None`."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._abandon()
            self._look()
            self._task = task
            Variable._execution_engine.queue_callback(self._settle)
        self._weights.append(weight)
        self._unit = self._unit or weight
        for name, gradient in gradients.items():
            if name not in self._coming:
                self._listen_to(name)
            if gradient is not None:
                self._coming[name].add(gradient, weight - self._unit)

    def add(self, gradients: Mapping[str, torch.Tensor], weight: float) -> None:
        """Adds the gradients of a backward pass, which has ended, to `grad`; `weight`: how much it counts."""
        self._look()
        self._weight, self._passes = self._weight + weight, self._passes + 1
        self._unit = self._unit or weight
        for name, gradient in gradients.items() if weight else ():
            p = self._parameters[name]
            others = self._others(name)
            excess = gradient * (weight - self._unit) if weight != self._unit else None
            p.grad = laid_out(gradient, p) if p.grad is None else p.grad.add_(gradient)
            self._keep(name, others, excess)

    def take(self, weight: float, among: Collection[str], delivers: Callable[[str], bool] = lambda name: True) -> Kept:
        """What was kept back, which `grad` then holds no longer; `weight`: how much the backward pass counts that
        synchronizes it. What others have added to `grad` since, or have left there of a parameter `among` those that
        are synchronized, counts as these passes do on average. Raises `CaptureError` where the user's changes of
        `grad` leave open what is to count how much. `delivers`: whether the synchronized gradient of a parameter is
        added to its `grad`, and not handed back alone, as by `torch.autograd.grad`. Ranks must say the same: whether a
        rank's own backward pass comes to the parameter says nothing, for another rank's may."""
        self._staying = set()
        is_under_way = torch._C._current_graph_task_id() == self._task
        if not is_under_way:
            self._abandon()
        self._look()
        if not any(map(delivers, among)):
            self._staying = set(self._parameters)
            return Kept()
        mean = (self._weight + weight) / (self._passes + 1)
        is_even = abs(mean - self._unit) <= 1e-12 * abs(mean)
        sums = {}
        for name, kept in self._in_grad.items():
            p = self._parameters[name]
            assert p.grad is not None
            stays = not delivers(name)  # where it is synchronized later, as what others have left
            if (kept.is_unclear or stays) and (kept.excess is not None or not is_even):
                done = "is left out of a backward pass behind those" if stays else "was changed between backward passes"
                raise CaptureError(
                    f"the gradient of parameter '{name}' {done} within no_sync() whose batches count differently, so "
                    "how much its parts count cannot be told: do that when it is synchronized, or use micro-batches "
                    "of one size"
                )
            if stays:
                self._staying.add(name)
                continue
            total = p.grad * self._unit
            if kept.excess is not None:
                total.add_(kept.excess)
            if kept.others is not None and not is_even:
                total.add_(kept.others, alpha=mean - self._unit)
            sums[name], p.grad = total, None
        for name, left in self._left_by_others(n for n in among if n not in self._in_grad).items():
            if not delivers(name):
                self._staying.add(name)
                continue
            sums[name] = left.to_dense() * mean if left.is_sparse else left * mean
            left.zero_()
        found, unit = Kept(sums, self._weight, self._passes), self._unit
        self._forget()
        if is_under_way:  # one pass keeps gradients back and synchronizes others: what it keeps is still to come
            self._unit = unit
        return found

    def note(self) -> None:
        """Remembers that what lies in `grad` is synchronized, after a backward pass."""
        for name, p in self._parameters.items():
            if name not in self._staying and p.grad is not None:
                self._synchronized[name] = (weakref.ref(p.grad), p.grad._version)

    def _left_by_others(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """By parameter, what lies in `grad` that no synchronized backward pass has left so, unless it is all zeros, as
        `zero_grad(set_to_none=False)` leaves it."""
        found = {}
        for name in names:
            p = self._parameters[name]
            lies, version = self._synchronized.get(name, (None, -1))
            is_own = lies is not None and lies() is p.grad and p.grad is not None and p.grad._version == version
            if p.grad is not None and not is_own:
                found[name] = p.grad
        dense = [n for n, left in found.items() if not left.is_sparse]
        if dense:  # asked at once: on a GPU the answer is waited for
            for name, is_any in zip(dense, torch.stack([found[n].any() for n in dense]).tolist(), strict=True):
                if not is_any:
                    del found[name]
        return found

    def _look(self) -> None:
        """Forgets what the user has dropped since."""
        dropped = [n for n, kept in self._in_grad.items() if kept.is_dropped(self._parameters[n].grad)]
        for name in dropped:
            del self._in_grad[name]
        if dropped and not self._in_grad:
            self._forget()

    def _forget(self) -> None:
        self._in_grad, self._unit, self._weight, self._passes = {}, 0.0, 0.0, 0

    def _others(self, name: str) -> torch.Tensor | None:
        """What lies in `grad` beforehand, where none of it was kept there."""
        before = self._parameters[name].grad
        return None if before is None or name in self._in_grad or not before.any() else before.clone()

    def _keep(self, name: str, others: torch.Tensor | None, excess: torch.Tensor | None) -> None:
        kept = self._in_grad.setdefault(name, _InGrad(None))
        kept.others, kept.excess = _added(kept.others, others), _added(kept.excess, excess)
        gradient = self._parameters[name].grad
        assert gradient is not None
        kept.note(gradient)

    def _listen_to(self, name: str) -> None:
        """Has a hook see the parameter's gradient of this backward pass, in the place of the user's hooks."""
        p = self._parameters[name]
        self._coming[name] = _Coming(p.grad, -1 if p.grad is None else p.grad._version, others=self._others(name))
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
            users = {key: hook for key, hook in (hooks or {}).items() if not isinstance(hook, _Listener)}
            if hooks and users:
                self._put_off.append((hooks, users))
                for key in users:
                    del hooks[key]
        self._listeners.append(p.register_hook(_Listener(self._comes, name)))  # type: ignore[no-untyped-call]

    def _comes(self, name: str, gradient: torch.Tensor) -> None:
        coming = self._coming[name]
        own, coming.own = coming.own, None
        if own is not gradient:
            rest = gradient.clone() if own is None else gradient - own
            coming.others = _added(coming.others, rest if rest.any() else None)

    def _settle(self) -> None:
        """After a backward pass: remembers what it has left in `grad`; nothing if it was `torch.autograd.grad`."""
        came = {}
        for name, coming in self._coming.items():
            now = self._parameters[name].grad
            if now is not None and (now is not coming.before or now._version != coming.version):
                came[name] = coming
        if came or not any(coming.is_certain for coming in self._coming.values()):
            self._weight, self._passes = self._weight + sum(self._weights), self._passes + len(self._weights)
        for name, coming in came.items():
            self._keep(name, coming.others, coming.excess)
        self._abandon()

    def _abandon(self) -> None:
        """Ends the backward pass under way, and puts the user's hooks back; one that has failed came to no end."""
        for listener in self._listeners:
            listener.remove()
        for hooks, users in self._put_off:
            hooks.update(users)
        self._task, self._coming, self._weights, self._put_off, self._listeners = -1, {}, [], [], []


def _added(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b
