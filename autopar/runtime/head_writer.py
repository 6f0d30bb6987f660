"""Writes the works of a class-sharded head into a graph: which nodes' values they are given, and which they replace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.fx

from autopar.ir.primitives import Primitive
from autopar.ir.training_graph import Head
from autopar.runtime import works
from autopar.runtime.heads import HeadShard

if TYPE_CHECKING:
    from autopar.runtime.writer import Writer, Written

Work = Callable[["Writer", Primitive, Sequence[Any]], "Written"]


def _count(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    return works.count(w, _head(w, p).samples)


def _samples(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    head = _head(w, p)
    hidden, target = w.copies[w.nodes[head.hidden]], w.copies[w.nodes[head.target]]
    return _do(w, p, hidden, target, *inputs, getattr(torch, p.dtype))


def _loss(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    value = _do(w, p, *inputs)
    w.copies[w.nodes[_head(w, p).loss]] = value
    return value


def _log_sum(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    name = _head(w, p).log_sum
    assert name is not None
    w.copies[w.nodes[name]] = value = _do(w, p, *inputs)
    return value


def _seed(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    head = _head(w, p)
    of_samples = None if head.log_sum_gradient is None else w.copies[w.nodes[head.log_sum_gradient]]
    return _do(w, p, *inputs, w.copies[w.nodes[head.seed]], of_samples)


def _returned(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    return _do(w, p, *inputs, getattr(torch, p.dtype))


def _hand_back(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    head = _head(w, p)
    assert head.hidden_gradient is not None
    return works.hand_back(w, head.hidden_gradient, inputs[0], head.samples, head.width)


def _gradient(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    names = [m.slice.name for m in w.program.groups[p.group].members]
    found = _do(w, p, *inputs, names)
    weight = _head(w, p).weight
    parts = {name: w.call(operator.getitem, (found, i)) for i, name in enumerate(names)}
    if any(m.parameter.table is not None for m in w.program.groups[p.group].members):  # rows are added to it
        return [w.graph.call_method("whole", (part,)) if name == weight else part for name, part in parts.items()]
    return [w.product(p, name, part) if name == weight else w.gradient(name, part) for name, part in parts.items()]


_WORKS: dict[str, Work] = {
    "count": _count,
    "samples": _samples,
    "loss": _loss,
    "log_sum": _log_sum,
    "seed": _seed,
    "returned": _returned,
    "hand_back": _hand_back,
    "gradient": _gradient,
}
"""By the names that `autopar.strategies.class_sharded_head` gives them; the others take their inputs and no more."""


def write(w: Writer, p: Primitive, work: str, inputs: Sequence[Any]) -> Written:
    """Writes one work, given the values of its inputs."""
    special = _WORKS.get(work)
    return _do(w, p, *inputs) if special is None else special(w, p, inputs)


def _head(w: Writer, p: Primitive) -> Head:
    head = w.program.groups[p.group].members[0].parameter.head
    assert head is not None
    return head


def _do(w: Writer, p: Primitive, *args: Any) -> torch.fx.Node:
    work = p.work.removeprefix("head.")
    assert hasattr(HeadShard, work), f"nobody knows how to do the work '{work}'"
    name, head = f"head_{p.group}", _head(w, p)
    if name not in w.modules:
        target = w.target
        bias = None if head.bias is None else target.shards[head.bias]
        w.modules[name] = HeadShard(head, target.shards[head.weight], bias, target.rank, target.world_size)
    return w.graph.call_method(work, (w.graph.get_attr(name), *args))
