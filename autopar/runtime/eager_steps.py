"""Runs a step whose model runs eagerly: what was written into its outline, between the model's own passes.

The model is called, and its loss's backward pass begun; as gradients become complete, hooks on the parameters run what
was written behind them, in the outline's order, which is the same on all ranks: collectives go beside the backward
pass, as with DDP. What a rank has no gradient of, in this step, is zeros to the others; what no rank has a gradient of
is not updated, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from autopar.backends.collectives import may_fail
from autopar.errors import CaptureError, SignatureError
from autopar.ir.batch import call_model
from autopar.ir.capture import find_loss
from autopar.ir.outline import opaque, run_backward, run_forward, take_gradient
from autopar.runtime.eager import owners_of
from autopar.runtime.process_group import Group

See = Callable[[str, torch.Tensor], None]
"""Is shown each of a rank's own gradients, by name."""


def loss_and_output(model: nn.Module, loss_fn: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """The model's loss on a batch, for gradients to begin from, and its output. Raises `SignatureError` where the loss
    is no scalar."""
    with torch.enable_grad():
        output, target = call_model(model, batch, loss_fn is not None)
        loss: Any = find_loss(output if loss_fn is None else loss_fn(output, target))
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
        group: Group,
    ) -> None:
        """`parameters`: those that are trained, by the plan's names. `in_pieces`: those among them whose gradients are
        complete only when the backward pass has ended."""
        self.model = model
        self.loss_fn = loss_fn
        self.parameters = dict(parameters)
        self.in_pieces = in_pieces
        self.keeps_output = False
        """Whether the next steps' outputs are wanted."""
        self.written: set[str] = set()
        """Parameters that the last forward pass has written to."""
        self._outputs: list[Any] = []
        self._see: See | None = None
        self._losses: list[torch.Tensor] = []
        self._group = group
        self._owners = owners_of(model, loss_fn)
        self._reached: set[str] = set()
        """Parameters that have got a gradient on this rank, in this step so far."""
        self._versions: dict[str, tuple[int, int]] = {}
        self._asked: tuple[torch.Tensor, Any] | None = None
        """Who has what, on its way between ranks."""
        self._unused: frozenset[str] = frozenset()
        self._changed: tuple[str, ...] = ()

    def begin(self) -> None:
        """Begins a step, of one or several micro-batches."""
        self._reached.clear()
        self._unused, self._changed, self._asked = frozenset(), (), None
        self._versions = {n: (id(b), b._version) for n, b in self._buffers()}

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
        """Parameters of which no rank has a gradient in this step; known once the last backward pass has ended."""
        self._settle()
        return self._unused

    def changed_buffers(self) -> tuple[str, ...]:
        """Buffers that the step has changed on some rank, but for statistics of batch normalization, which nothing
        reads in training."""
        self._settle()
        return self._changed

    def loss(self, batch: Any) -> torch.Tensor:
        """The forward pass, for gradients to begin from. Raises `SignatureError` where its loss is no scalar, and
        `CaptureError` where it writes to parameters that other ranks have, too."""
        written = {n: p._version for n, p in self.parameters.items()}
        loss, output = loss_and_output(self.model, self.loss_fn, batch)
        if self.keeps_output:
            self._outputs.append(pytree.tree_map(_detached, output))
        self.written = {n for n, p in self.parameters.items() if p._version != written[n]}
        if self.written and self._group.world_size > 1:
            raise CaptureError(
                f"the model writes to its parameter '{min(self.written)}' in its forward pass, as "
                "Embedding(max_norm=...) does: each rank would write something else, for its own batch, and ranks "
                "would drift apart. Change the parameter between steps, under torch.no_grad()"
            )
        if self._see is not None:
            self._losses.append(loss.detach())
        return loss

    @contextmanager
    def watched(self, take: See) -> Iterator[None]:
        """While it is open, each gradient is handed to `take` once it is complete. Gradients that lie on the
        parameters are put aside meanwhile."""

        def hook(name: str) -> Callable[[torch.Tensor], None]:
            def done(p: torch.Tensor) -> None:
                gradient, p.grad = p.grad, None
                assert gradient is not None
                with torch.no_grad():
                    gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach()
                    self.reach(name)
                    if self._see is not None:
                        self._see(name, gradient)
                    take(name, gradient)

            return done

        before = [(p, p.grad) for p in self.parameters.values()]
        handles = []
        for n, p in self.parameters.items():
            p.grad = None
            handles.append(p.register_post_accumulate_grad_hook(hook(n)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for p, gradient in before:
                p.grad = gradient

    def end_passes(self) -> None:
        """Behind the last backward pass of a step: begins to ask which parameters and buffers others have used."""
        names, buffers = list(self.parameters), list(self._buffers())
        changed = [float(self._versions.get(n) != (id(b), b._version)) for n, b in buffers]
        flags = torch.tensor([*(float(n in self._reached) for n in names), *changed])
        work = None
        if self._group.pg is not None:
            device = next(iter(self.parameters.values())).device
            flags = flags.to(device)
            with may_fail():
                work = dist.all_reduce(flags, group=self._group.pg, async_op=True)
        self._asked = flags, work

    def _settle(self) -> None:
        if self._asked is None:
            return
        (flags, work), self._asked = self._asked, None
        if work is not None:
            with may_fail():
                work.wait()
        found = [flag > 0 for flag in flags.tolist()]
        of_parameters, of_buffers = found[: len(self.parameters)], found[len(self.parameters) :]
        self._unused = frozenset(n for n, used in zip(self.parameters, of_parameters, strict=True) if not used)
        buffers = (n for n, _ in self._buffers())
        self._changed = tuple(n for n, one in zip(buffers, of_buffers, strict=True) if one)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By name, once each; those of batch normalization left out."""
        for start, owner in self._owners.items():
            for path, module in owner.named_modules():
                if isinstance(module, _NormBase):
                    continue
                for name, buffer in module.named_buffers(path, recurse=False):
                    yield start + name, buffer


@dataclass(frozen=True)
class _Piece:
    """Nodes between two parts of the model's own run."""

    run: torch.fx.GraphModule
    takes: tuple[torch.fx.Node, ...]
    gives: tuple[torch.fx.Node, ...]


class EagerStep(nn.Module):
    """A graph that was written into an outline, run between the model's own passes. Called as the graph would be."""

    written: torch.fx.GraphModule
    model: EagerModel

    def __init__(self, written: torch.fx.GraphModule, model: EagerModel, synchronizes: bool) -> None:
        """`synchronizes`: whether gradients are complete behind it, rather than added to by a later one."""
        super().__init__()
        for name, module in written.named_children():
            self.add_module(name, module)
        self.__dict__["written"] = written  # no submodule: its own are here already
        self.model = model
        self.synchronizes = synchronizes
        self.inputs = tuple(written.graph.find_nodes(op="placeholder"))
        self.results = written.graph.output_node().args[0]
        self.parts = self._cut([n for n in written.graph.nodes if n.op not in ("placeholder", "output")])
        own = [i for i, part in enumerate(self.parts) if isinstance(part, torch.fx.Node)]
        self.last_own = max(own)
        """Of the parts, the last one of the model's own run."""
        self.frees = self._last_uses()
        """Behind each part, the values that nobody reads any more."""

    def forward(self, *arguments: Any) -> Any:
        return Run(self, arguments).result()

    def _last_uses(self) -> list[list[torch.fx.Node]]:
        kept: set[torch.fx.Node] = set()
        torch.fx.node.map_arg(self.results, kept.add)
        last = {n: i for i, part in enumerate(self.parts) for n in _reads(part) if n not in kept}
        found: list[list[torch.fx.Node]] = [[] for _ in self.parts]
        for node, i in last.items():
            found[i].append(node)
        return found

    def _cut(self, nodes: Sequence[torch.fx.Node]) -> list[_Piece | torch.fx.Node]:
        found: list[_Piece | torch.fx.Node] = []
        begin = 0
        for i, node in enumerate([*nodes, None]):
            if node is None or opaque(node):
                if i > begin:
                    found.append(self._piece(nodes[begin:i]))
                if node is not None:
                    found.append(node)
                begin = i + 1
        return found

    def _piece(self, nodes: Sequence[torch.fx.Node]) -> _Piece:
        graph, own = torch.fx.Graph(), set(nodes)
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        takes = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in own))
        for taken in takes:
            copies[taken] = graph.placeholder(taken.name)
        for node in nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        gives = tuple(n for n in nodes if any(u not in own for u in n.users))
        graph.output(tuple(copies[n] for n in gives))
        return _Piece(torch.fx.GraphModule(self.written, graph), tuple(takes), gives)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _reads(part: _Piece | torch.fx.Node) -> Sequence[torch.fx.Node]:
    return part.takes if isinstance(part, _Piece) else part.all_input_nodes


class Run:
    """One run of a step."""

    def __init__(self, step: EagerStep, arguments: Sequence[Any]) -> None:
        self.of = step
        self.at = 0
        self.values: dict[torch.fx.Node, Any] = dict(zip(step.inputs, arguments, strict=True))
        self.complete: dict[str, torch.Tensor] = {}
        """Gradients that nobody has taken yet."""
        self.taken: set[str] = set()
        self.ended = False
        """Whether the backward pass has ended."""
        self.begun: torch.Tensor | None = None

    def result(self) -> Any:
        """Runs to the end."""
        self.advance()
        assert self.at == len(self.of.parts), "a step ends behind the backward pass"
        return torch.fx.node.map_arg(self.of.results, lambda n: self.values[n])

    def advance(self) -> None:
        """Runs on, until a gradient is awaited that is not complete."""
        while self.at < len(self.of.parts):
            at, part = self.at, self.of.parts[self.at]
            if isinstance(part, torch.fx.Node) and part.target is take_gradient and not self._can_take(part):
                return
            self.at += 1  # a backward pass comes back here, from its hooks
            if isinstance(part, _Piece):
                with torch.no_grad():
                    made = part.run(*(self.values[n] for n in part.takes))
                self.values.update(zip(part.gives, made, strict=True))
            else:
                self.values[part] = self._own(part)
            for node in self.of.frees[at]:
                self.values.pop(node, None)
            if at == self.of.last_own and self.of.synchronizes:
                self.of.model.end_passes()

    def _can_take(self, part: torch.fx.Node) -> bool:
        name = part.args[1]
        return self.ended or (name in self.complete and name not in self.of.model.in_pieces)

    def _own(self, part: torch.fx.Node) -> Any:
        """Runs a part of the model's own."""
        model = self.of.model
        if part.target is run_forward:
            self.begun = model.loss(self.values[part.args[0]])  # type: ignore[index]
            return self.begun.detach()
        if part.target is run_backward:
            return self._backward(self.values[part.args[1]])  # type: ignore[index]
        name = str(part.args[1])
        self.taken.add(name)
        gradient = self.complete.pop(name, None)
        return torch.zeros_like(model.parameters[name]) if gradient is None else gradient

    def _backward(self, tangent: torch.Tensor) -> None:
        loss, self.begun = self.begun, None
        if loss is None:  # the user's own backward pass is under way
            return
        if bool(tangent.count_nonzero()) and loss.requires_grad:  # else the loss may be no number
            with self.of.model.watched(self.take):
                loss.backward(tangent.to(loss.dtype).reshape(loss.shape))  # type: ignore[no-untyped-call]
        self.ended = True

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Takes a gradient that is complete, and runs on."""
        if name in self.taken:
            raise CaptureError(
                f"parameter '{name}' has got a second gradient in one backward pass, after its first one was sent, "
                "which the first batches did not show. Where a checkpoint computes it twice, pass use_reentrant=False "
                "to torch.utils.checkpoint"
            )
        self.complete[name] = self.complete[name] + gradient if name in self.complete else gradient
        self.advance()
