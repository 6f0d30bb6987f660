"""Reads off the joint graph how much a batch counts in the global loss."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.fx

from autopar.ir.batch_weight import BatchWeight
from autopar.ir.capture import JointGraph
from autopar.ir.loss_reader import Reader
from autopar.ir.loss_terms import Count, Fixed, Rows, Term, Unknown, Value, elements
from autopar.ir.sizes import following, take_hint
from autopar.ir.symbols import StaticOnlyError

aten = torch.ops.aten

_FRAME = re.compile(r'File "(.+)", line (\d+), in ')


def batch_weight(joint: JointGraph, batch_size: int | None, names: Sequence[str] = ()) -> BatchWeight:
    """What the loss of `joint` is a mean over; samples where the graph does not tell. `names`: of the batch's tensors,
    for people."""
    loss = joint.outputs[0]
    kinds = dict(zip(joint.module.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    samples = BatchWeight("samples", constant=float(1 if batch_size is None else batch_size), where=_line(loss))
    if not batch_size:
        return samples if batch_size is None else replace(samples, is_sum=True)
    called = {n: names[int(i)] for n, (kind, i) in kinds.items() if kind == "batch" and int(i) < len(names)}
    value: Value = Reader({n: kind for n, (kind, _) in kinds.items()}, batch_size, called).read(loss)
    if isinstance(value, Rows):  # the loss of a single sample, not reduced
        value = Term((elements(batch_size),))
    if isinstance(value, Fixed):
        value = Term(()) if value.per is None else Unknown(loss, "is the reciprocal of a count")
    if isinstance(value, Unknown):
        return replace(samples, is_mean=False, problem=value.why, where=_line(value.node) or samples.where)
    if not value.counts:
        return replace(samples, is_mean=value.counts is not None, is_sum=value.adds)
    first, *others = (_weight(joint, kinds, c) for c in value.counts)
    nothing = frozenset(c.nothing for c in value.counts if c.nothing is not None)
    return replace(
        first, is_sum=value.adds, others=_different(first, others), where=samples.where, may_be_nothing=nothing
    )


def of_listed(weight: BatchWeight, samples: int | None) -> BatchWeight:
    """The weight of a batch that lists so many samples (`None`: it does not): these, where its loss is not a mean over
    one thing, as means over each sample's own objects are."""
    if samples is None or not (weight.others or weight.problem):
        return weight
    return BatchWeight("samples", constant=float(samples), is_sum=True, where=weight.where)


def of_sizes(joint: JointGraph, listed: int | None = None, names: Sequence[str] = ()) -> BatchWeight:
    """The same of a graph that serves batches of several sizes; `listed`: of so many samples. Raises `StaticOnlyError`
    where the weight follows from the sizes in a way that is not understood."""
    sizes = joint.sizes
    assert sizes is not None
    take_hint(joint, 1)
    other = batch_weight(joint, listed or sizes.samples(sizes.hints[1]), names)
    take_hint(joint, 0)
    weight = batch_weight(joint, listed or sizes.samples(sizes.hints[0]), names)
    others = tuple(_followed(joint, a, b) for a, b in zip(weight.others, other.others, strict=False))
    if len(others) < max(len(weight.others), len(other.others)):
        raise StaticOnlyError("what the loss is a mean over follows from the batch's sizes")
    return replace(_followed(joint, weight, other), others=others)


def _followed(joint: JointGraph, a: BatchWeight, b: BatchWeight) -> BatchWeight:
    """A weight that has been read at both hints."""
    alike = replace(a, constant=None, counted=None, others=()) == replace(b, constant=None, counted=None, others=())
    codes = ["" if w.counted is None else w.counted.code for w in (a, b)]
    if not alike or codes[0] != codes[1]:
        raise StaticOnlyError("what the loss is a mean over follows from the batch's sizes")
    if a.constant is None or b.constant is None or a.constant == b.constant:
        return replace(a, sizes=joint.sizes)
    follows = following(joint, (a.constant, b.constant))
    if follows is None:
        raise StaticOnlyError("how much a batch counts follows from its sizes in a way that is not understood")
    return replace(a, sizes=joint.sizes, follows=follows)


def _different(first: BatchWeight, others: list[BatchWeight]) -> tuple[BatchWeight, ...]:
    return tuple(w for w in others if w.constant is None or w.constant != first.constant)


def _weight(joint: JointGraph, kinds: Mapping[torch.fx.Node, tuple[str, str | int]], count: Count) -> BatchWeight:
    if count.node is None:
        return BatchWeight(count.unit, constant=count.factor)
    wanted = [n for n in (count.node, count.class_weight) if n is not None]
    needed, frontier = set(wanted), list(wanted)
    while frontier:
        more = [n for n in frontier.pop().all_input_nodes if n not in needed]
        needed.update(more)
        frontier += more
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    reads: list[tuple[str, str | int]] = []
    root: dict[str, object] = {}
    for node in joint.module.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            copies[node] = graph.placeholder(f"{kinds[node][0]}_{len(reads)}")
            reads.append(kinds[node])
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            if node.op == "get_attr":
                root[str(node.target)] = getattr(joint.module, str(node.target))
    total = copies[count.node]
    if count.ignored is not None:
        kept = graph.call_function(aten.ne.Scalar, (total, count.ignored))
        if count.class_weight is not None:
            classes = graph.call_function(aten.mul.Tensor, (total, kept))
            each = graph.call_function(aten.index.Tensor, (copies[count.class_weight], [classes]))
            kept = graph.call_function(aten.mul.Tensor, (each, kept))
        total = graph.call_function(aten.sum.default, (kept,), {"dtype": torch.float64})
    else:
        total = graph.call_function(aten.sum.default, (total,), {"dtype": torch.float64})
        total = graph.call_function(aten.mul.Tensor, (total, count.factor))
    graph.output(total)
    return BatchWeight(
        count.unit, counted=torch.fx.GraphModule(root, graph, class_name="BatchWeight"), reads=tuple(reads)
    )


def _line(node: torch.fx.Node | None) -> str:
    """The innermost line of the user's own code that computes a node."""
    frames = _FRAME.findall("" if node is None else node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in frames if "/torch/" not in file and "/autopar/" not in file]
    return own[-1] if own else ""
