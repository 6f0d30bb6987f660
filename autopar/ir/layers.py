"""Finds linear layers: a weight that one product of the forward pass reads, and the products of the backward pass.

Read off the joint graph. Where nothing else reads the weight, ranks can share its rows out, each computing some of the
outputs of all ranks' samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx

from autopar.ir.aliases import base, is_written, readers
from autopar.ir.training_graph import Layer, Parts

aten = torch.ops.aten


def find_layer(
    weight: torch.fx.Node,
    parts: Parts | None,
    position: Mapping[torch.fx.Node, int],
    nodes: Mapping[str, torch.fx.Node],
) -> Layer | None:
    """The layer that a parameter is the weight of; `None` where it is read otherwise, too. `parts`: what its gradient
    is made of. `nodes`: the graph's, by name."""
    if parts is None or parts.kind != "factors" or len(parts.terms) != 1:
        return None
    term = parts.terms[0]
    given, left = nodes[term.right], nodes[term.left]
    if term.right_transposed or not term.left_transposed or left.target is not aten.t.default:
        return None
    error = left.args[0]
    of_given = [u for u in weight.users if u.target is aten.mm.default and u.args[1] is weight and u.args[0] is error]
    turned = [u for u in weight.users if u not in of_given]
    if len(of_given) > 1 or len(turned) != 1 or turned[0].target is not aten.t.default or len(turned[0].users) != 1:
        return None
    (product,) = turned[0].users
    if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs:
        return None
    if tuple(product.args[-2:]) != (given, turned[0]):
        return None
    assert isinstance(error, torch.fx.Node)
    products = [*of_given, nodes[term.node]]
    turn = min(map(position.__getitem__, products))
    if position[product] > turn:  # the weight of a layer that reads it turned over, seen from the other end
        return None
    if any(is_written(r, error) and turn <= position[r] <= term.position for r in readers(base(error))):
        return None
    only = [left] if set(left.users) <= set(products) else []
    samples, width = given.meta["val"].shape
    return Layer(
        given=given.name,
        product=product.name,
        bias=str(product.args[0]) if product.target is aten.addmm.default else None,
        error=error.name,
        given_gradient=of_given[0].name if of_given else None,
        samples=int(samples),
        width=int(width),
        outputs=int(weight.meta["val"].shape[0]),
        product_position=position[product],
        turn=turn - 1,
        replaced=tuple(n.name for n in (turned[0], product, *only, *products)),
    )
