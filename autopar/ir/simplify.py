"""Simplifications of the joint graph: what autograd's tracing leaves behind and a run need not pay for.

Each is `graph -> None` and changes no value. `autopar.ir.passes` lists them in the order in which they run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

aten = torch.ops.aten

_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_SHARED = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
    }
)


def remove_identities(graph: torch.fx.Graph) -> None:
    """Removes detach and alias: without autograd at run time they only cost a dispatch."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])


def fold_views(graph: torch.fx.Graph) -> None:
    """Folds a transpose of a transpose, a view of a view, and views that change nothing."""
    for node in graph.nodes:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], torch.fx.Node):
            continue
        source = node.args[0]
        if node.target in (aten.view.default, aten.expand.default) and _same_shape(node, source):
            node.replace_all_uses_with(source)
        elif source.op == "call_function" and source.target is node.target:
            if node.target is aten.t.default or (node.target is aten.transpose.int and _dims(node) == _dims(source)):
                node.replace_all_uses_with(source.args[0])
            elif node.target is aten.view.default:
                node.replace_input_with(source, source.args[0])


def share_views(graph: torch.fx.Graph) -> None:
    """Makes one node of equal views of the same value."""
    seen: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _SHARED or node.kwargs:
            continue
        key = (node.target, *(tuple(a) if isinstance(a, list) else a for a in node.args))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed: leave the node alone
            continue
        if first is not node:
            node.replace_all_uses_with(first)


def remove_dead_code(graph: torch.fx.Graph) -> None:
    """Removes nodes whose value nobody reads; random operators stay, as later ones draw from the same stream."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not _has_effect(node):
            graph.erase_node(node)


def eager_dropout(graph: torch.fx.Graph) -> None:
    """Writes dropout on CPUs as eager PyTorch computes it: a multiplication with scaled noise, forward and backward.

    The fused operator that tracing records multiplies with a boolean mask there, which costs a conversion each time;
    this is faster, and draws the same numbers as eager training does.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        source, p, train = node.args
        value = source.meta["val"]
        users = {u.args[1]: u for u in node.users}
        mask = users.get(1)
        readers = list(mask.users) if mask is not None else []
        if value.device.type != "cpu" or train is not True or not 0 <= p < 1 or value.numel() == 0:
            continue
        if any(u.target is not aten.native_dropout_backward.default for u in readers):
            continue
        with graph.inserting_before(node):
            noise = source if p == 0 else graph.call_function(dropout_noise, (source, p))
            if noise is not source:
                noise.meta |= {k: v for k, v in source.meta.items() if k in ("val", "symbolic")}
        for old, operand in ((users.get(0), source), *((u, u.args[0]) for u in readers)):
            if old is None:
                continue
            if p == 0:
                old.replace_all_uses_with(operand)
                continue
            with graph.inserting_before(old):
                new = graph.call_function(aten.mul.Tensor, (operand, noise))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
        for replaced in (*readers, *list(node.users), node):  # random operators are never dead code to FX
            graph.erase_node(replaced)


def dropout_noise(like: torch.Tensor, p: float) -> torch.Tensor:
    """0 with probability p, else 1 / (1 - p): drawn as `torch.nn.functional.dropout` draws it."""
    return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)


def _has_effect(node: torch.fx.Node) -> bool:
    target = node.target
    return (
        (
            not isinstance(target, torch._ops.OpOverload)
            and target.__class__.__name__
            not in (
                "builtin_function_or_method",
                "function",
            )
        )
        or (isinstance(target, torch._ops.OpOverload) and (target._schema.is_mutable or not target._schema.returns))
        or node.is_impure()
        or target is dropout_noise
        or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    )


def _same_shape(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype == y.dtype


def _dims(node: torch.fx.Node) -> tuple[int, ...]:
    source, *dims = node.args
    assert isinstance(source, torch.fx.Node)
    rank = source.meta["val"].dim()
    return tuple(sorted(d % rank for d in dims if isinstance(d, int)))
