"""Reuse of memory: elementwise operators write over an input that nobody reads again, as eager autograd does.

Only for graphs that run as a whole: what one half of a split graph saves for the other must stay as it is.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

from autopar.ir.aliases import base, readers, repeats_memory

aten = torch.ops.aten

_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.neg.default: aten.neg_.default,
}
FUNCTIONAL = {in_place: target for target, in_place in _IN_PLACE.items()}
"""By each operator that writes over its input, the one that computes the same into memory of its own."""
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
"""Operators whose first two arguments are exchanged where the second is the one to be overwritten."""
_MAY_RETURN_THEIR_INPUT = (aten.native_dropout.default,)


def views_where_they_can_be(graph: torch.fx.Graph) -> None:
    """Makes each view one that copies where the memory it looks at lies otherwise than tracing has said: attention on
    CPUs, for one, returns another layout than its rule for shapes does."""
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default


def reuse_memory(graph: torch.fx.Graph) -> None:
    """Makes elementwise operators in place where the overwritten input is the graph's own, dense, read for the last
    time, and not read by the same operator at another place."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _IN_PLACE:
            continue
        places = (0, 1) if node.target in COMMUTATIVE and not node.kwargs else (0,)
        for place in places:
            if place < len(node.args) and _may_overwrite(node, node.args[place], position):
                if place == 1:
                    node.args = (node.args[1], node.args[0])
                node.target = _IN_PLACE[node.target]
                break
    graph.lint()


def _may_overwrite(node: torch.fx.Node, source: object, position: dict[torch.fx.Node, int]) -> bool:
    if not isinstance(source, torch.fx.Node):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if (before.shape, before.dtype, before.stride()) != (after.shape, after.dtype, after.stride()):
        return False
    if repeats_memory(before):
        return False
    owner = base(source)
    if any(a is not source and base(a) is owner for a in node.all_input_nodes):
        return False  # the other operand lies in the same memory: `h - h[:, :1]` would read what is overwritten
    made_by = owner.args[0] if owner.target is operator.getitem else owner
    if made_by is not owner and any(u is not owner and u.args == owner.args for u in made_by.users):  # type: ignore[union-attr]
        return False  # another name of the same element
    if owner.op != "call_function" or getattr(made_by, "target", None) in _MAY_RETURN_THEIR_INPUT:
        return False
    return all(position[r] <= position[node] for r in readers(owner))
