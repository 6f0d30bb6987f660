"""The outline of a step that runs eagerly: what a graph shows of a model that cannot be captured as one.

It has one node for each part of the forward pass, which begins where a parameter is first used, one for where the
backward pass begins, and one for each gradient, in the order in which they were seen to become complete, with the times
that were measured. Strategies are lowered into it, priced on it and written into it as into any joint graph;
`autopar.runtime.uncaptured.steps` runs what was written, the model's own part of it by calling the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import torch
import torch.fx
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.batch import Batch
from autopar.ir.branches import branches
from autopar.ir.capture import JointGraph
from autopar.ir.read_targets import weight_of
from autopar.ir.seen import Seen, nonzero_rows
from autopar.ir.training_graph import ComputeNode, Parameter, Parts, Term, TrainingGraph
from autopar.spec.plan import ModelFingerprint, ParameterSpec


@dataclass(frozen=True)
class Outline(JointGraph):
    """An outline, as a joint graph: placeholders are the parameters that are trained, the batch as a whole, and the
    tangent of the loss."""

    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Of each node, by name, as it was measured."""
    in_pieces: frozenset[str] = frozenset()
    """Parameters whose gradients are complete only when the backward pass has ended."""
    foreseen: bool = False
    """As in `Seen`."""


def go_forward(batch: Any, *parameters: Any, names: tuple[str, ...]) -> Never:
    """Stands for a part of the forward pass, which begins with the first use of these parameters."""
    raise AssertionError("the forward pass of an outline is run by who runs the outline")


def run_forward(batch: Any, *parameters: Any, names: tuple[str, ...]) -> Never:
    """Stands for the last part of the forward pass; its value is the loss."""
    raise AssertionError("the forward pass of an outline is run by who runs the outline")


def run_backward(loss: Any, tangent: Any) -> Never:
    """Stands for the beginning of the backward pass."""
    raise AssertionError("the backward pass of an outline is run by who runs the outline")


def take_gradient(backward: Any, name: str) -> Never:
    """Stands for the moment at which a gradient is complete; its value is the gradient."""
    raise AssertionError("a gradient of an outline is taken by who runs the outline")


def all_rows(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient all of whose rows are wanted."""
    return gradient


def opaque(node: torch.fx.Node) -> bool:
    """Whether a node stands for a part of the model's own run."""
    return node.op == "call_function" and node.target in (go_forward, run_forward, run_backward, take_gradient)


def outline(
    fingerprint: ModelFingerprint,
    batch: Batch,
    seen: Seen,
    buffer_bytes: int,
    absent: Sequence[Collection[str]] = (),
) -> TrainingGraph:
    """The training graph of a model that runs eagerly, as one step has shown it. All ranks must use what one has
    `seen`: the order of collectives follows from it. `absent`: for each rank, the parameters of which its example has
    given no gradient; by default, those of this one. Raises `CaptureError` where no parameter is trained."""
    table = {p.name: p for p in fingerprint.parameters if p.trainable}
    order = [(n, s) for n, s in seen.gradients if n in table]
    there = {n for n, _ in order}
    order += [(n, 0.0) for n in table if n not in there]
    if not order:
        raise CaptureError("no parameter gets a gradient from the loss: is every one frozen, or the loss detached?")
    graph = torch.fx.Graph()
    inputs: list[tuple[str, str | int]] = []
    trained = {}
    for name in table:
        trained[name] = graph.placeholder(f"parameter_{len(inputs)}")
        trained[name].meta["val"] = _like(table[name])
        inputs.append(("parameter", name))
    given, tangent = graph.placeholder("batch"), graph.placeholder("tangent")
    inputs += [("whole batch", 0), ("tangent", 0)]
    loss = torch.empty((), dtype=getattr(torch, seen.loss_dtype), device="meta")
    parts = _forward_parts(seen, list(table))
    steps = []
    for i, (names, _) in enumerate(parts):
        target = go_forward if i + 1 < len(parts) else run_forward
        steps.append(graph.call_function(target, (given, *(trained[n] for n in names)), {"names": tuple(names)}))
        steps[-1].meta["val"] = None
    forward = steps[-1]
    backward = graph.call_function(run_backward, (forward, tangent))
    tangent.meta["val"] = forward.meta["val"] = loss
    after: list[torch.fx.Node] = [backward]
    gradients, rows_of = {}, {}
    distinct, since = dict(seen.rows), dict(order)
    for name, _ in order:
        taken = gradients[name] = graph.call_function(take_gradient, (backward, name))
        taken.meta["val"] = _like(table[name])
        after.append(taken)
        if name in distinct:
            gradients[name], nodes = _in_rows(taken)
            after += nodes
            rows_of[name] = _row_parts(nodes, distinct[name], len(steps) + len(after) - 3)
    graph.output([forward, *gradients.values()])
    seconds = {step.name: s for step, (_, s) in zip(steps, parts, strict=True)} | {n.name: 0.0 for n in after}
    seconds |= {n.name: since[str(n.args[1])] for n in after if n.target is take_gradient}
    joint = Outline(
        module=torch.fx.GraphModule(nn.Module(), graph, class_name="Outline"),
        inputs=tuple(inputs),
        mutations=(),
        outputs=(forward,),
        gradients=gradients,
        weight=weight_of(batch, seen.targets, seen.unread),
        seconds=seconds,
        in_pieces=frozenset(seen.in_pieces),
        foreseen=seen.foreseen,
    )
    end = len(seconds) - 1
    positions = {name: i for i, name in enumerate(seconds)}
    uses = {n: i for i, (names, _) in enumerate(parts) for n in names}
    left_out = branches({n: spec.shape for n, spec in table.items()}, absent or [seen.absent]) if seen.foreseen else {}
    return TrainingGraph(
        model=fingerprint,
        parameters=tuple(
            # A parameter may be read until the backward pass has ended: nobody knows by what.
            Parameter(
                spec,
                gradients[n].name,
                positions[gradients[n].name],
                first_use=uses[n],
                last_use=end,
                structure="rows" if n in rows_of else "dense",
                parts=rows_of.get(n),
                branch=left_out.get(n),
            )
            for n, spec in table.items()
        ),
        compute=_nodes(seconds, seen, len(steps)),
        backward_start=len(steps),
        batch_size=batch.size,
        buffer_bytes=buffer_bytes,
        input_bytes=sum(t.numel() * t.element_size() for t in batch.tensors),
        joint=joint,
        eager=True,
    )


def _in_rows(taken: torch.fx.Node) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
    """The gradient, of which also the rows that are not zero can be asked for; and its nodes behind the one that takes
    it: indices, values, gradient."""
    graph, value = taken.graph, taken.meta["val"]
    indices = graph.call_function(nonzero_rows, (taken,))
    values = graph.call_function(torch.index_select, (taken, 0, indices))
    gradient = graph.call_function(all_rows, (taken,))
    indices.meta["val"] = torch.empty(0, dtype=torch.int64, device="meta")
    values.meta["val"] = value[:0]
    gradient.meta["val"] = value
    return gradient, [indices, values, gradient]


def _row_parts(nodes: Sequence[torch.fx.Node], distinct: int, first: int) -> Parts:
    """`first`: position of the first of the nodes."""
    indices, values, gradient = nodes
    term = Term(gradient.name, first + 2, indices.name, values.name)
    width = gradient.meta["val"].shape[1]
    return Parts("rows", (term,), distinct, distinct, 0, width, first, (gradient.name,))


def _like(spec: ParameterSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


_MOST_PARTS = 24
"""Parts into which the forward pass is cut by time. It is cut where as great a share of the parameters has been used,
too: time alone would make one part of a forward pass that was held up once as it was timed."""


def _forward_parts(seen: Seen, trained: Sequence[str]) -> list[tuple[list[str], float]]:
    """The parts of the forward pass: the parameters that are first used where each begins, or a moment later, and its
    seconds. What was not seen to be used is used in the first."""
    known = set(trained)
    timed = {n for n, _ in seen.uses}
    most = max(2, math.ceil(len(timed) / _MOST_PARTS))  # a weight and its bias stay together
    parts: list[tuple[list[str], float]] = [([n for n in trained if n not in timed], 0.0)]
    left = seen.forward_s
    for name, since in seen.uses:
        names, lasted = parts[-1]
        parts[-1] = names, lasted + since
        left -= since
        is_long = parts[-1][1] >= seen.forward_s / _MOST_PARTS
        if is_long or len(names) >= most or (len(parts) == 1 and not names):
            parts.append(([], 0.0))
        if name in known:
            parts[-1][0].append(name)
    names, lasted = parts[-1]
    parts[-1] = names, lasted + max(left, 0.0)
    return parts if parts[0][0] or parts[0][1] or len(parts) == 1 else parts[1:]


def _nodes(seconds: dict[str, float], seen: Seen, parts: int) -> tuple[ComputeNode, ...]:
    """The nodes, each pass's operations shared out as its time is: the backward pass has twice the forward pass's.
    `parts`: of the forward pass."""
    names, end = list(seconds), len(seconds) - 1
    of_pass = [sum(seconds[n] for n in names[:parts]), sum(seconds[n] for n in names[parts:])]
    counts = [parts, max(1, len(names) - parts - 1)]

    def share(i: int) -> float:
        k = int(i >= parts)
        return (k + 1) * (seconds[names[i]] / of_pass[k] if of_pass[k] else float(i != parts) / counts[k])

    return tuple(
        ComputeNode(
            name=n,
            op="forward pass" if i < parts else "gradient" if i > parts else "backward pass",
            flops=round(seen.flops * share(i)),
            bytes_moved=round(seen.saved_bytes * share(i)),
            live_bytes=seen.saved_bytes,
            own_bytes=seen.saved_bytes if i == parts - 1 else 0,
            needed_until=end if i < parts else i,
        )
        for i, n in enumerate(names)
    )
