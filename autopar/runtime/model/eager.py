"""The user's own model, run eagerly beside its program, and leaving no trace: what the program must equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from autopar.ir.batch import call_model
from autopar.ir.gradient_modes import outside_of_autocast
from autopar.ir.model_output import find_loss
from autopar.ir.reachable import has_reentrant_checkpoint
from autopar.runtime.model.generators import generators, set_generators
from autopar.runtime.model.held_state import held_within, kept_within, of_classes, parts
from autopar.runtime.model.held_values import held_values
from autopar.runtime.model.iterators import Iterators
from autopar.runtime.model.shared_memory import once

Take = Callable[[str, torch.Tensor], None]
"""Is given each parameter's name and gradient, once a backward pass, which then lets go of it."""


class _PlainLoss(nn.Module):
    """Stands for a loss that is no module: it has no parameters and no buffers; the state that its code names is kept
    and put back, that of modules, too."""

    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        called = getattr(loss_fn, "__call__", None)  # noqa: B004
        self.held = called if isinstance(called, MethodType) else loss_fn  # of an object, its method


def owners_of(model: nn.Module, loss_fn: Any) -> dict[str, nn.Module]:
    """The modules that take part in a step, by what the names of their parameters and buffers begin with."""
    if loss_fn is None:
        return {"": model}
    return {"": model, "loss_fn.": loss_fn if isinstance(loss_fn, nn.Module) else _PlainLoss(loss_fn)}


def kept_attributes(owners: Iterable[nn.Module]) -> Callable[[], None]:
    """Keeps the attributes of modules and of all within, what containers, other objects and generators of random
    numbers among them hold, those of their classes, and the values of tensors among these that are neither parameters
    nor buffers; of modules among them, which are registered nowhere, these, too. What is returned puts that back."""
    modules = list(dict.fromkeys(m for owner in owners for m in owner.modules()))
    iterators = Iterators()
    attributes = [one for m in modules for one in kept_within(vars(m), iterators)]
    of_kinds, of_classes_back = of_classes(modules, iterators)
    # TorchScript's tables are no dicts, and what they hold cannot be replaced.
    registered: list[Any] = [t for m in modules for t in (m._parameters, m._buffers) if isinstance(t, dict)]
    own = [dict(t) for t in registered]
    inside, back = held_within([*_beside_tables(modules), *of_kinds], modules, iterators)
    trained = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    values = held_values([t for t in inside if id(t) not in trained], [*trained.values()])

    def put_back() -> None:
        values()
        for one in (*attributes, *of_classes_back, *back):
            one()
        for table, content in zip(registered, own, strict=True):
            if list(map(id, parts(table))) != list(map(id, parts(content))):
                table.clear()
                table.update(content)

    return put_back


def held_by(owners: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The tensors among what modules and their classes hold, in attributes and further in, that are neither parameters
    nor buffers."""
    modules, iterators = list(dict.fromkeys(m for owner in owners for m in owner.modules())), Iterators()
    of_kinds, _ = of_classes(modules, iterators)
    return held_within([*_beside_tables(modules), *of_kinds], modules, iterators)[0]


def _beside_tables(modules: Sequence[nn.Module]) -> list[Any]:
    """What modules hold beside their parameters and buffers."""
    tables = {id(t) for m in modules for t in (m._parameters, m._buffers)}
    return [v for m in modules for v in vars(m).values() if id(v) not in tables]


@contextlib.contextmanager
def without_trace(owners: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Puts back what running a model changes: buffers, attributes of modules and what they list, random streams, and
    gradients. Hooks on parameters do not run: one that updates its parameter would leave a trace.

    `owners`: by what the names of their buffers begin with. The dict that it gives is filled, at its end, with the
    buffers as running the model has left them.
    """
    put_back = kept_attributes(owners.values())
    buffers = dict(_buffers(owners))
    before = {n: once(b).clone() for n, b in buffers.items()}
    parameters = [p for owner in owners.values() for p in owner.parameters()]
    gradients = [p.grad for p in parameters]
    random = generators()
    after: dict[str, torch.Tensor] = {}
    for p in parameters:
        p.grad = None
    torch.clear_autocast_cache()  # it knows weights by who they are, and not by what was written to them since
    try:
        with without_hooks(parameters):
            yield after
    finally:
        torch.clear_autocast_cache()
        after.update({n: b.detach().clone() for n, b in _buffers(owners)})
        set_generators(random)
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        put_back()
        with torch.no_grad():
            for n, b in buffers.items():
                once(b).copy_(before[n])


@contextlib.contextmanager
def without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it, hooks on these parameters' gradients do not run."""
    hung = [t for p in parameters for t in (p._backward_hooks, p._post_accumulate_grad_hooks) if t]
    hooks = [(table, dict(table)) for table in hung]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, kept in hooks:
            table.update(kept)


def _buffers(owners: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for start, owner in owners.items():
        for name, buffer in owner.named_buffers():
            yield start + name, buffer


def loss_of(model: nn.Module, loss_fn: Any, batch: Any) -> torch.Tensor:
    """The model's loss on a batch, as its program computes it."""
    output, target = call_model(model, batch, loss_fn is not None)
    return find_loss(output if loss_fn is None else loss_fn(output, target), batch)  # type: ignore[no-any-return]


def gradients_of(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """What `torch.autograd.grad` gives of leaves, also through a reentrant checkpoint, which refuses that. What lies on
    the leaves as gradients stays there."""
    if not has_reentrant_checkpoint(outputs):
        with outside_of_autocast():
            return list(torch.autograd.grad(outputs, leaves, tangents, allow_unused=True))
    before = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    try:
        with outside_of_autocast():
            torch.autograd.backward(list(outputs), list(tangents))
        return [t.grad for t in leaves]
    finally:
        for t, gradient in zip(leaves, before, strict=True):
            t.grad = gradient


def backward(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter], take: Take) -> None:
    """The backward pass; each gradient is handed to `take` and let go of before the next ones are all there."""

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def done(p: torch.Tensor) -> None:
            assert p.grad is not None
            with torch.no_grad():
                take(name, p.grad)
            p.grad = None

        return done

    handles = [p.register_post_accumulate_grad_hook(hook(n)) for n, p in parameters.items()]  # type: ignore[no-untyped-call]
    try:
        with outside_of_autocast():
            loss.reshape(()).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
