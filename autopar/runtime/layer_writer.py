"""Writes the works of a linear layer in shares of its outputs into a graph: which nodes' values they are given, and
which they replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from autopar.ir.primitives import Primitive
from autopar.ir.training_graph import Layer
from autopar.runtime import works
from autopar.runtime.layers import LayerShard

if TYPE_CHECKING:
    from autopar.runtime.writer import Writer, Written


def _count(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    return works.count(w, _layer(w, p).samples)


def _given(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    _known(w, p)["counts"] = _do(w, p, "agreed", inputs[0])
    return _do(w, p, "given", w.copies[w.nodes[_layer(w, p).given]], _counts(w, p), _dtype(p))


def _found(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    _known(w, p)["everyone"] = everyone = _do(w, p, "everyone", inputs[0], _counts(w, p))
    return works.message(w, _do(w, p, "found", everyone, _counts(w, p), _dtype(p)))


def _product(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    layer = _layer(w, p)
    node = w.nodes[layer.product]
    bias = None
    if layer.bias is not None:
        source = w.nodes[layer.bias]
        bias = w.instead.get(node, {}).get(source, w.copies[source])
    w.copies[node] = value = _do(w, p, "product", inputs[0], _counts(w, p), bias)
    return value


def _errors(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    error = w.copies[w.nodes[_layer(w, p).error]]
    return works.message(w, _do(w, p, "errors", error, _counts(w, p), _dtype(p)))


def _own_errors(w: Writer, p: Primitive, received: Any) -> torch.fx.Node:
    known = _known(w, p)
    if "errors" not in known:
        known["errors"] = _do(w, p, "own_errors", received, _counts(w, p))
    return known["errors"]


def _returned(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    return _do(w, p, "returned", _own_errors(w, p, inputs[0]), _counts(w, p), _dtype(p))


def _hand_back(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    layer = _layer(w, p)
    assert layer.given_gradient is not None
    return works.hand_back(w, layer.given_gradient, inputs[0], layer.samples, layer.width)


def _gradient(w: Writer, p: Primitive, inputs: Sequence[Any]) -> Written:
    name = w.program.groups[p.group].members[0].slice.name
    found = _do(w, p, "gradient", _own_errors(w, p, inputs[0]), _known(w, p)["everyone"])
    return [w.product(p, name, found)]


_WORKS: dict[str, Callable[[Writer, Primitive, Sequence[Any]], Written]] = {
    "count": _count,
    "given": _given,
    "found": _found,
    "product": _product,
    "errors": _errors,
    "returned": _returned,
    "gradient": _gradient,
    "hand_back": _hand_back,
}
"""By the names that `autopar.strategies.column_parallel_linear` gives them."""


def write(w: Writer, p: Primitive, work: str, inputs: Sequence[Any]) -> Written:
    """Writes one work, given the values of its inputs."""
    return _WORKS[work](w, p, inputs)


def _layer(w: Writer, p: Primitive) -> Layer:
    layer = w.program.groups[p.group].members[0].parameter.layer
    assert layer is not None
    return layer


def _known(w: Writer, p: Primitive) -> dict[str, torch.fx.Node]:
    return w.of_layers.setdefault(p.group, {})


def _counts(w: Writer, p: Primitive) -> torch.fx.Node:
    return _known(w, p)["counts"]


def _dtype(p: Primitive) -> torch.dtype:
    return getattr(torch, p.dtype)  # type: ignore[no-any-return]


def _do(w: Writer, p: Primitive, work: str, *args: Any) -> torch.fx.Node:
    name = f"layer_{p.group}"
    if name not in w.modules:
        target, group = w.target, w.program.groups[p.group]
        weight = target.shards[group.members[0].slice.name]
        w.modules[name] = LayerShard(_layer(w, p), weight, target.rank, target.world_size)
    return w.graph.call_method(work, (w.graph.get_attr(name), *args))
