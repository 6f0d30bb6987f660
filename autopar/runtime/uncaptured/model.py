"""A model that its program runs eagerly, and what a step of it shows: gradients as they come, and what got none.

What a rank has no gradient of, in one step, is zeros to the others; what no rank has a gradient of is not updated, as
in one process. Which these are, ranks tell each other as the backward pass ends, and which buffers have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError, SignatureError
from autopar.ir.batch import call_model
from autopar.ir.first_uses import watched
from autopar.ir.gradient_modes import outside_of_autocast
from autopar.ir.model_output import find_loss
from autopar.ir.reachable import reachable
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.eager import owners_of
from autopar.runtime.model.pre_use_hooks import by_its_program
from autopar.runtime.uncaptured.anywhere import Anywhere
from autopar.runtime.uncaptured.buffers import EagerBuffers

See = Callable[[str, torch.Tensor], None]
"""Is shown each of a rank's own gradients, by name."""
Alone = Callable[[frozenset[str], Sequence[str]], None]
"""Is told the parameters that a step has given no gradient on this rank so far, and the buffers that it has changed."""


def loss_and_output(model: nn.Module, loss_fn: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """The model's loss on a batch, for gradients to begin from, and its output. Raises `SignatureError` where the loss
    is no scalar."""
    with torch.enable_grad():
        output, target = call_model(model, batch, loss_fn is not None)
        loss: Any = find_loss(output if loss_fn is None else loss_fn(output, target), batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise SignatureError(
            f"the loss must be one scalar, got {shape}: reduce it with .mean() or .sum() in the model or in loss_fn"
        )
    return loss, output


class EagerModel:
    """The model that a program runs eagerly, and what its last step has shown."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        parameters: Mapping[str, nn.Parameter],
        in_pieces: frozenset[str],
        foreseen: bool,
        group: Group,
        alone: Alone | None = None,
    ) -> None:
        """`parameters`: those that are trained, by the plan's names. `in_pieces`: those among them whose gradients are
        complete only when the backward pass has ended. `foreseen`: whether the autograd graph of the example says which
        gradients come. `alone`: in steps that other ranks run as graphs, so that nothing is asked of them, is told what
        the step has shown, before anything is sent."""
        self.model = model
        self.loss_fn = loss_fn
        self.parameters = dict(parameters)
        self.in_pieces = in_pieces
        self.keeps_output = False
        """Whether the next steps' outputs are wanted."""
        self.written: set[str] = set()
        """Parameters that the last forward pass has written to."""
        self.can_be_watched = True
        """Whether the forward pass can tell of the first uses of parameters."""
        self._versions: dict[str, int] = {}
        """Of each parameter, as far as it was written to by others than the model in this forward pass."""
        self._outputs: list[Any] = []
        self._see: See | None = None
        self._losses: list[torch.Tensor] = []
        self._group = group
        self._alone = alone
        owners = owners_of(model, loss_fn)
        self._everything = [p for owner in owners.values() for p in owner.parameters()]
        """Those that other programs train, too."""
        self.buffers = EagerBuffers(owners, group)
        self._reached: set[str] = set()
        """Parameters that have got a gradient on this rank, in this step so far."""
        self._foreseen = foreseen
        self._misses = False
        """Whether some have got none in a step so far: then it is found out beforehand which."""
        self.is_apart = False
        """Whether the backward pass under way was begun within another one, and comes to parameters by a way of its
        own, as from a reentrant checkpoint in the loss: then it is a pass by itself, which all ranks must have."""
        self._leaves_out = False
        """Whether no rank had a gradient of some in a step so far, as all ranks know: then they ask beforehand, too."""
        self._asked_beforehand: Anywhere | None = None
        self._is_forward = False
        self._strays: set[str] = set()
        """Parameters that have got a gradient within the forward pass."""
        self._take: See | None = None
        self._loss_scale = 1.0
        self._share: torch.Tensor | None = None
        """What complete gradients are multiplied with, where the backward pass under way has not begun with it."""
        self.accumulators = {n: get_gradient_edge(p).node for n, p in self.parameters.items()}
        """What autograd adds each gradient up in; they live, with hooks on them, for as long as they are held."""
        for name, node in self.accumulators.items():
            node.register_hook(partial(self._complete, name))
        self._asked: Anywhere | None = None
        """Who has which gradients and has changed which buffers, on its way between ranks."""
        self._asked_before: Anywhere | None = None
        """The answers about the step before, where this rank has not waited for them."""
        self._unused: frozenset[str] = frozenset()
        self._meanwhile: Callable[[], None] | None = None

    def begin(self, goes_on: bool = False, loss_scale: float = 1.0) -> None:
        """Begins a step, of one or several micro-batches. `goes_on`: whether forward passes before are part of it.
        `loss_scale`: a factor of what backward passes begin from."""
        self._loss_scale = loss_scale
        self._reached.clear()
        self._outputs.clear()  # of a step that has failed
        self._asked_before = self._asked or self._asked_before
        self._unused, self._asked = frozenset(), None
        if not goes_on:
            self.buffers.begin()

    @contextmanager
    def seen(self, see: See, losses: list[torch.Tensor]) -> Iterator[None]:
        """While it is open, `see` is shown this rank's own gradients, which count as its share of the global batch, and
        `losses` takes its batches' losses."""
        self._see, self._losses = see, losses
        try:
            yield
        finally:
            self._see, self._losses = None, []

    def take_outputs(self) -> list[Any]:
        """What the model has returned since this was called last, where that was wanted."""
        found, self._outputs = self._outputs, []
        return found

    def reach(self, name: str) -> None:
        """Notes that a parameter has got a gradient on this rank."""
        self._reached.add(name)

    def unused(self) -> frozenset[str]:
        """Parameters of which no rank has a gradient in this step; known once the last backward pass has ended. A rank
        that has a gradient of each knows without asking, and does not wait for the others: their answers lie
        behind gradients that are on their way. In a pass that is apart, it has to know whether they have it, too."""
        if len(self._reached) == len(self.parameters) and not self.is_apart:
            return frozenset()
        self._settle()
        return self._unused

    def missing_here(self) -> frozenset[str]:
        """Parameters that this rank has no gradient of in this step, and another rank has; known as `unused` is."""
        return frozenset(self.parameters.keys() - self._reached - self.unused())

    def share_buffers(self, what: str) -> None:
        """Gives all ranks rank 0's values of the buffers that the step has changed on some rank, but for statistics of
        batch normalization, which nothing reads in training."""
        if self.buffers.exist:
            self._settle()
            self.buffers.share(what)

    def loss(self, batch: Any, first_uses: Mapping[str, Callable[[], None]] = MappingProxyType({})) -> torch.Tensor:
        """The forward pass, for gradients to begin from. `first_uses`: by parameter, what is called before it is first
        read. Raises `SignatureError` where its loss is no scalar, and `CaptureError` where it writes to parameters that
        other ranks have, too."""
        self._versions = self.versions()
        self._strays.clear()
        self._is_forward = True
        try:
            told = [(self.parameters[n], tell) for n, tell in first_uses.items()]
            with watched(told) as met, by_its_program(self.model):
                loss, output = loss_and_output(self.model, self.loss_fn, batch)
            self.can_be_watched &= not met.compiler_began
        finally:
            self._is_forward = False
        if self._strays:
            raise CaptureError(
                f"parameter '{min(self._strays)}' gets a gradient from a backward pass within the forward pass, which "
                "a step does not synchronize: use torch.autograd.grad there, or leave the optimizer out of optimize()"
            )
        if self.keeps_output:
            self._outputs.append(pytree.tree_map(_detached, output))
        self.written = {n for n, p in self.parameters.items() if p._version != self._versions[n]}
        if self.written and self._group.world_size > 1:
            raise CaptureError(
                f"the model writes to its parameter '{min(self.written)}' in its forward pass, as "
                "Embedding(max_norm=...) does: each rank would write something else, for its own batch, and ranks "
                "would drift apart. Change the parameter between steps, under torch.no_grad()"
            )
        if self._see is not None:
            self._losses.append(loss.detach())
        return loss

    def versions(self) -> dict[str, int]:
        """Of each parameter, how often it was written to."""
        return {n: p._version for n, p in self.parameters.items()}

    @contextmanager
    def receives(self) -> Iterator[None]:
        """While it is open, within a forward pass, it is not the model that writes to parameters."""
        before = self.versions()
        yield
        for n, p in self.parameters.items():
            self._versions[n] += p._version - before[n]

    def begin_from(self, loss: torch.Tensor, tangent: torch.Tensor, take: See) -> None:
        """The backward pass; each gradient is handed to `take` once it is complete. What lies on the parameters as
        gradients meanwhile stays there."""
        before = [p.grad for p in self._everything]
        for p in self._everything:
            p.grad = None
        hooked = any(p._backward_hooks for p in self.parameters.values())
        if hooked or loss.dtype.itemsize < tangent.dtype.itemsize:
            # Hooks are given what DDP gives them, and a share in few bits would scale every gradient by its rounding.
            scale = torch.full_like(tangent, self._loss_scale)
            self._share, tangent = tangent / scale, scale
        self._take = take
        try:
            with outside_of_autocast():
                loss.backward(tangent.to(loss.dtype).reshape(loss.shape))  # type: ignore[no-untyped-call]
        finally:
            self._take = self._share = None
            for p, gradient in zip(self._everything, before, strict=True):
                p.grad = gradient

    def absent(self, begun: Iterable[torch.Tensor]) -> frozenset[str]:
        """Parameters that get no gradient from a backward pass that begins from these tensors; none where nobody can
        say, or where no step has left one out so far."""
        if not (self._misses and self._foreseen):
            return frozenset()
        found = reachable(begun, self.accumulators.values())
        return frozenset(n for n, a in self.accumulators.items() if found is not None and a not in found)

    def ask_beforehand(self, absent: frozenset[str]) -> None:
        """Ahead of the last backward pass of a step, of which this rank gets no gradients of `absent`: begins to ask
        which parameters no rank uses, where that is worth it."""
        self._look_back()
        self._asked_beforehand = None
        if self._leaves_out and self._see is None:
            self._asked_beforehand = self._ask([n in self._reached or n not in absent for n in self.parameters])

    @property
    def tells_beforehand(self) -> bool:
        """Whether others rely on what this rank has said ahead of the backward pass."""
        return self._asked_beforehand is not None

    @property
    def knows_beforehand(self) -> bool:
        """Whether `unused_beforehand` returns at once."""
        return self._asked_beforehand is None or self._asked_beforehand.are_there

    def unused_beforehand(self) -> frozenset[str]:
        """Parameters of which no rank will have a gradient in this step, as far as that was asked ahead of the backward
        pass; the same on all ranks."""
        if self._asked_beforehand is None:
            return frozenset()
        return self._without(self._asked_beforehand.answers())

    def own_gradient(self, name: str) -> torch.Tensor | None:
        """Takes a parameter's gradient, that was complete just now, from where autograd has left it."""
        p = self.parameters[name]
        gradient, p.grad = p.grad, None
        if gradient is None:
            return None
        self._reached.add(name)
        if gradient.is_sparse:
            return gradient.to_dense()
        return gradient.detach() if gradient.requires_grad else gradient

    def _complete(self, name: str, *_: Any) -> None:
        take = self._take
        if take is None:
            if self._is_forward:
                self._strays.add(name)
            return
        gradient = self.own_gradient(name)  # a backward pass that nobody goes back through records nothing
        if gradient is None:  # an autograd.Function may give none
            return
        if self._share is not None:
            gradient = (gradient * self._share).to(gradient.dtype)
        if self._see is not None:
            self._see(name, gradient)
        take(name, gradient)

    def end_earlier(self) -> None:
        """Behind the backward pass of a micro-batch that others follow, whose graphs may read what it wrote."""
        if self._alone is not None:
            self.buffers.written()

    def do_meanwhile(self, do: Callable[[], None]) -> None:
        """Has something done in the next step while its last gradients are on their way, before parameters change."""
        self._meanwhile = do

    def end_passes(self) -> None:
        """Behind the last backward pass of a step: begins to ask which parameters and buffers others have used."""
        self._tell_passes()
        do, self._meanwhile = self._meanwhile, None
        if do is not None:
            do()

    def _tell_passes(self) -> None:
        names = list(self.parameters)
        if self._alone is not None:
            return self._alone(frozenset(names) - self._reached, self.buffers.written())
        self._misses |= len(self._reached) < len(names)
        self._look_back()
        ways = [self.is_apart, not self.is_apart]
        self._asked = self._ask([*(n in self._reached for n in names), *ways, *self.buffers.changes()])

    def _ask(self, mine: Sequence[bool]) -> Anywhere:
        return Anywhere(mine, self._group, next(iter(self.parameters.values())).device)

    def _settle(self) -> None:
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        found = self._checked(asked.answers())
        self._unused = self._without(found)
        self._leaves_out |= bool(self._unused)
        self.buffers.settle(found[len(self.parameters) + 2 :])

    def _look_back(self) -> None:
        """Reads the ranks' answers about the step before, where this rank has not waited for them."""
        before, self._asked_before = self._asked_before, None
        if before is not None:
            self._leaves_out |= bool(self._without(self._checked(before.answers())))

    def _checked(self, found: list[bool]) -> list[bool]:
        """The answers about a step. Raises `CaptureError` where not all ranks came to its end by the same way."""
        if all(found[len(self.parameters) :][:2]):
            raise CaptureError(
                "a backward pass that a function or a hook began within another one, as a reentrant checkpoint in the "
                "loss does, came to the module's parameters by a way of its own on some ranks and not on others, so "
                "that gradients of different passes were added up. Pass use_reentrant=False to the checkpoint"
            )
        return found

    def _without(self, found: Sequence[bool]) -> frozenset[str]:
        """Parameters of which the answers say that no rank has a gradient."""
        return frozenset(n for n, used in zip(self.parameters, found, strict=False) if not used)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
