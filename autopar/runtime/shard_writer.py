"""Writes the works of sharded parameters into a graph: what is gathered takes the parameter's place, in each pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from autopar.ir.aliases import base, is_view, readers
from autopar.ir.primitives import Primitive
from autopar.runtime.shards import ParameterShards
from autopar.strategies.base import Member

if TYPE_CHECKING:
    from autopar.runtime.writer import Writer, Written

FORWARD = "forward"


def _own(w: Writer, p: Primitive, which: str, inputs: Sequence[Any]) -> Written:
    return _do(w, p, "own", _some(w, p, which), w.is_last if which == FORWARD else None)


def _whole(w: Writer, p: Primitive, which: str, inputs: Sequence[Any]) -> Written:
    whole = _do(w, p, "whole", *inputs, _some(w, p, which), which == FORWARD)
    for i, member in enumerate(_some(w, p, which)):
        value = w.call(operator.getitem, (whole, i))
        spec = _members(w, p)[member].parameter.spec
        for node in _inputs(w, (spec.name, *spec.ties)):
            w.copies[node] = value
            if which != FORWARD:
                _view_again(w, node)
    return None


def _view_again(w: Writer, node: torch.fx.Node) -> None:
    """Views that the forward pass has made of what it was given, and that the backward pass reads, too."""
    views = {v for v in readers(node) if v in w.copies and is_view(v) and base(v) is node}
    for view in sorted(views, key=w.position.__getitem__):
        w.copy(view)


def _pack(w: Writer, p: Primitive, which: str, inputs: Sequence[Any]) -> Written:
    gradients = [w.gradients[m.slice.name] for m in _members(w, p)]
    return _do(w, p, "pack", gradients, getattr(torch, p.dtype), w.scale)


def _gradient(w: Writer, p: Primitive, which: str, inputs: Sequence[Any]) -> Written:
    found = _do(w, p, "gradient", *inputs)
    return [w.gradient(m.slice.name, w.call(operator.getitem, (found, i))) for i, m in enumerate(_members(w, p))]


_WORKS: dict[str, Callable[[Writer, Primitive, str, Sequence[Any]], Written]] = {
    "own": _own,
    "whole": _whole,
    "pack": _pack,
    "gradient": _gradient,
}
"""By the names that `autopar.strategies.sharded_parameters` gives them."""


def write(w: Writer, p: Primitive, work: str, inputs: Sequence[Any]) -> Written:
    """Writes one work, given the values of its inputs."""
    name, _, which = work.partition(".")
    return _WORKS[name](w, p, which, inputs)


def _members(w: Writer, p: Primitive) -> tuple[Member, ...]:
    return w.program.groups[p.group].members


def _some(w: Writer, p: Primitive, which: str) -> list[int]:
    """The members that a pass reads."""
    members = _members(w, p)
    return [i for i, m in enumerate(members) if which == FORWARD or m.parameter.first_backward >= 0]


def _inputs(w: Writer, names: Sequence[str]) -> list[torch.fx.Node]:
    placeholders = w.joint.module.graph.find_nodes(op="placeholder")
    wanted = {("parameter", name) for name in names}
    return [node for node, key in zip(placeholders, w.joint.inputs, strict=True) if key in wanted]


def _do(w: Writer, p: Primitive, work: str, *args: Any) -> torch.fx.Node:
    name = f"shards_{p.group}"
    if name not in w.modules:
        members, target = _members(w, p), w.target
        shapes = [m.parameter.spec.shape for m in members]
        strides = [_inputs(w, (m.slice.name,))[0].meta["val"].stride() for m in members]
        shards = [target.shards[m.slice.name] for m in members]
        w.modules[name] = ParameterShards(shards, shapes, strides, target.rank, target.world_size)
    return w.graph.call_method(work, (w.graph.get_attr(name), *args))
