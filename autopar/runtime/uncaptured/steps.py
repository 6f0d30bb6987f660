"""Runs a step whose model runs eagerly: what was written into its outline, between the model's own passes.

The model is called; where parameters are still on their way, what receives them runs as the model first uses them. The
loss's backward pass is begun; as gradients become complete, what was written behind them
runs, in the outline's order, which is the same on all ranks: collectives go beside the backward pass, as with DDP. What
is written behind the last gradient, as updates are, runs when the backward pass has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
import torch.fx
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.outline import go_forward, opaque, run_backward, run_forward, take_gradient
from autopar.ir.seen import nonzero_rows
from autopar.ops.base import Call
from autopar.ops.spared import sparable
from autopar.runtime.step_writer import batch_share
from autopar.runtime.uncaptured.model import EagerModel
from autopar.runtime.writer import CALL


@dataclass(frozen=True)
class _Piece:
    """Nodes between two parts of the model's own run."""

    run: torch.fx.GraphModule
    takes: tuple[torch.fx.Node, ...]
    gives: tuple[torch.fx.Node, ...]
    group: int | None
    """Of which sync group it is a part; `None` of what is done for all."""


@dataclass(frozen=True)
class _Gradients:
    """Gradients that the next piece reads."""

    nodes: frozenset[torch.fx.Node]


Part = _Piece | _Gradients | torch.fx.Node
"""What a step is run by: pieces, and the model's passes and gradients between them."""


class EagerStep(nn.Module):
    """A graph that was written into an outline, run between the model's own passes. Called as the graph would be."""

    written: torch.fx.GraphModule
    model: EagerModel

    def __init__(
        self, written: torch.fx.GraphModule, model: EagerModel, calls: Iterable[Call], synchronizes: bool
    ) -> None:
        """`calls`: those that are written into it, on some rank. `synchronizes`: whether gradients are complete behind
        it, rather than added to by a later one."""
        super().__init__()
        for name, module in written.named_children():
            self.add_module(name, module)
        self.__dict__["written"] = written  # no submodule: its own are here already
        self.model = model
        self.synchronizes = synchronizes
        for node in reversed(written.graph.nodes):
            if node.target in (torch.index_select, nonzero_rows) and not node.users:
                written.graph.erase_node(node)  # rows of a gradient that is sent whole
        self.inputs = tuple(written.graph.find_nodes(op="placeholder"))
        self.results = written.graph.output_node().args[0]
        nodes = [n for n in written.graph.nodes if n.op not in ("placeholder", "output")]
        self.parts = self._cut(nodes)
        self.share = next((n for n in nodes if n.target is batch_share), None)
        """What gradients are multiplied with as they are sent, in a drop-in module's backward pass on several ranks."""
        self.adds_earlier = any(n.name.startswith("earlier_") for n in self.inputs)
        self.gradients = {str(n.args[1]): n for n in nodes if n.target is take_gradient}
        self.names = {n: name for name, n in self.gradients.items()}
        self.place = {n: i for i, part in enumerate(self.parts) for n in _makes(part)}
        """Of each node, among the parts."""
        self.last_own = max(self.place[n] for n in nodes if opaque(n))
        """Of the parts, the last one of the model's own run."""
        self.passes = [n for n in nodes if n.target in (go_forward, run_forward)]
        self.first_uses = self._first_uses()
        """By parameter, the place of the part of the forward pass that begins with its use, where something is to run
        before that."""
        self.spared = sparable(calls)
        """By sync group, its parameters: of groups that have nothing to do where no rank has a gradient of theirs."""
        self.frees = self._last_uses()
        """Behind each part, the values that nobody reads any more."""

    def forward(self, *arguments: Any) -> Any:
        return Run(self, arguments).result()

    def _first_uses(self) -> dict[str, int]:
        return {
            name: self.place[part]
            for i, part in enumerate(self.passes)
            if self.place[part] > self.place[self.passes[0]] + i
            for name in cast(tuple[str, ...], part.kwargs["names"])
        }

    def _last_uses(self) -> list[list[torch.fx.Node]]:
        kept: set[torch.fx.Node] = set()
        torch.fx.node.map_arg(self.results, kept.add)
        last = {n: i for i, part in enumerate(self.parts) for n in _reads(part) if n not in kept}
        found: list[list[torch.fx.Node]] = [[] for _ in self.parts]
        for node, i in last.items():
            found[i].append(node)
        return found

    def _cut(self, nodes: Sequence[torch.fx.Node]) -> list[Part]:
        found: list[Part] = []
        for (kind, of), group in groupby(nodes, lambda n: (n.target, None) if opaque(n) else (None, _group(n))):
            own = list(group)
            if kind is None:
                found.append(self._piece(own, of))
            elif kind is take_gradient:
                found.append(_Gradients(frozenset(own)))
            else:
                found += own
        return found

    def _piece(self, nodes: Sequence[torch.fx.Node], of: int | None) -> _Piece:
        graph, own = torch.fx.Graph(), set(nodes)
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        takes = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in own))
        for taken in takes:
            copies[taken] = graph.placeholder(taken.name)
        for node in nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        gives = tuple(n for n in nodes if any(u not in own for u in n.users))
        graph.output(tuple(copies[n] for n in gives))
        return _Piece(torch.fx.GraphModule(self.written, graph), tuple(takes), gives, of)


def _group(node: torch.fx.Node) -> int | None:
    """The sync group for which a call has written a node; `None` where it receives what the step before has sent."""
    call, _ = node.meta.get(CALL, (None, False))
    return None if call is None or call.group is None or call.completes_step_before else int(call.group.index)


def _makes(part: Part) -> Iterable[torch.fx.Node]:
    if isinstance(part, torch.fx.Node):
        return (part,)
    return part.nodes if isinstance(part, _Gradients) else part.gives


def _reads(part: Part) -> Iterable[torch.fx.Node]:
    if isinstance(part, torch.fx.Node):
        return part.all_input_nodes
    return () if isinstance(part, _Gradients) else part.takes


class Run:
    """One run of a step."""

    def __init__(self, step: EagerStep, arguments: Sequence[Any]) -> None:
        self.of = step
        self.at = 0
        self.values: dict[torch.fx.Node, Any] = dict(zip(step.inputs, arguments, strict=True))
        self.missing: set[torch.fx.Node] = set()
        """Gradients that are waited for."""
        self.stalls = False
        """Whether it is waited for what the other ranks say of the next piece."""
        self.ended = False
        """Whether the backward pass has ended."""
        self.begun: torch.Tensor | None = None
        self.absent: frozenset[str] = frozenset()
        """Parameters that get no gradient from the backward pass, as is known before it begins."""
        self._forward_began = False
        self._spared: dict[int, bool] = {}

    def result(self) -> Any:
        """Runs to the end."""
        self.advance()
        assert self.at == len(self.of.parts), "a step ends behind the backward pass"
        return torch.fx.node.map_arg(self.of.results, self._value)

    def advance(self) -> None:
        """Runs on, until a gradient is awaited that is not complete."""
        parts = self.of.parts
        while self.at < len(parts):
            part = parts[self.at]
            if isinstance(part, _Gradients) and not self._has(part):
                return
            if self.at > self.of.last_own and not self.ended:
                return  # what is still to come of the backward pass may read parameters
            if isinstance(part, _Piece) and not (self.ended or self._can_tell(part.group)):
                self.stalls = True  # the backward pass goes on meanwhile
                return
            self._run(part)

    def is_left_out(self, weight: float) -> bool:
        """Whether this rank's gradients, of a batch that counts by `weight`, are zeros to all ranks, as they may be no
        numbers. Where nothing counts on any rank, all ranks' gradients have equal shares. Known once the run waits for
        the first gradient."""
        if weight or self.of.adds_earlier:
            return not weight
        return self.of.share is None or not self.values.get(self.of.share)

    def use(self, place: int) -> None:
        """Runs what stands before a part of the forward pass, in which the parameters are used that it begins with."""
        if self.at <= place:
            with self.of.model.receives():
                while self.at <= place:
                    self._run(self.of.parts[self.at])

    def _run(self, part: Part) -> None:
        at = self.at
        self.at += 1  # the model's passes come back here, from uses and gradients
        if isinstance(part, _Piece):
            if not self._is_spared(part.group):
                with torch.no_grad():
                    made = part.run.forward(*map(self._value, part.takes))  # nobody hooks it
                self.values.update(zip(part.gives, made, strict=True))
        elif isinstance(part, torch.fx.Node):
            self.values[part] = self._own(part)
        for node in self.of.frees[at]:
            self.values.pop(node, None)
        if at == self.of.last_own:
            self.of.model.end_passes() if self.of.synchronizes else self.of.model.end_earlier()

    def end(self) -> None:
        """Behind the backward pass: what has got no gradient by now gets none."""
        self.ended = True
        self.missing.clear()

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Takes a gradient that is complete, and runs on."""
        node = self.of.gradients[name]
        relied_on = name in self.absent and self.of.model.tells_beforehand
        if relied_on or self.of.place[node] < self.at:
            if name in self.absent:
                raise CaptureError(
                    f"parameter '{name}' has got a gradient, of which the loss's autograd graph does not show that it "
                    "gets one, after other ranks were told that it gets none: a hook on a tensor or a gradient may not "
                    "begin a backward pass through parameters. Do that in the loss"
                )
            raise CaptureError(
                f"parameter '{name}' has got a second gradient in one backward pass, after its first one was sent, "
                "which the first batches did not show. Where a checkpoint computes it twice, pass use_reentrant=False "
                "to torch.utils.checkpoint"
            )
        self.values[node] = self.values[node] + gradient if node in self.values else gradient
        waited = node in self.missing and name not in self.of.model.in_pieces
        if waited:
            self.missing.remove(node)
        if self.stalls or (waited and not self.missing):
            self.stalls = False
            self.advance()

    def _has(self, part: _Gradients) -> bool:
        """Whether gradients are there, or do not come any more."""
        if not (self.missing or self.ended):
            self.missing = {n for n in part.nodes if self._is_awaited(n)}
        return not self.missing

    def _value(self, node: torch.fx.Node) -> Any:
        """What a node has made; of a gradient that has not come, zeros."""
        if node not in self.values and node.target is take_gradient:
            self.values[node] = torch.zeros_like(self.of.model.parameters[str(node.args[1])])
        return self.values[node]

    def _can_tell(self, group: int | None) -> bool:
        """Whether `_is_spared` returns at once."""
        if group is None or group in self._spared or not self.of.spared.get(group, frozenset("?")) <= self.absent:
            return True
        return self.of.model.knows_beforehand

    def _is_spared(self, group: int | None) -> bool:
        """Whether a group does nothing in this step, as no rank has a gradient of its parameters. All ranks find the
        same; one that has a gradient knows without asking."""
        if group is None or group not in self.of.spared:
            return False
        if group not in self._spared:
            names = self.of.spared[group]
            self._spared[group] = names <= self.absent and names <= self.of.model.unused_beforehand()
        return self._spared[group]

    def _is_awaited(self, gradient: torch.fx.Node) -> bool:
        name = self.of.names[gradient]
        if name in self.of.model.in_pieces:
            return True
        return gradient not in self.values and name not in self.absent

    def _own(self, part: torch.fx.Node) -> Any:
        """Runs a pass of the model; a part of the forward pass but the first is under way already, or has been."""
        if part.target is not run_backward:
            if not self._forward_began:
                self._forward_began = True
                model, batch, end = self.of.model, self.values[part.args[0]], self.of.passes[-1]  # type: ignore[index]
                uses = {n: partial(self.use, place) for n, place in self.of.first_uses.items()}
                if not model.can_be_watched:
                    self.use(self.of.place[end])
                self.begun = model.loss(batch, uses if model.can_be_watched else {})
                self.use(self.of.place[end])  # what has not been used
                self.values[end] = self.begun.detach()
            return self.values.get(part)
        loss, self.begun = self.begun, None
        if loss is None:  # the user's own backward pass is under way
            return None
        tangent = self.values[part.args[1]]  # type: ignore[index]
        counts = bool(tangent.count_nonzero()) and loss.requires_grad  # else the loss may be no number
        self.absent = self.of.model.absent([loss] if counts else [])
        if self.of.synchronizes:
            self.of.model.ask_beforehand(self.absent)
        if counts:
            self.advance()  # to the first gradient that is awaited, from where each that comes runs on
            self.of.model.begin_from(loss, tangent, self.take)
        self.end()
        return None
