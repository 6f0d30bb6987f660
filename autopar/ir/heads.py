"""Finds heads: a linear layer over many classes, and the cross-entropy of its scores.

Read off the joint graph, from the softmax outwards: forward to the product of what the layer is given and its weight,
backward to the gradients of both. Where nothing else reads what lies between, nor the weight but to look rows up, ranks
can share the classes out, each scoring all ranks' samples for its own (Megatron-LM's vocabulary-parallel loss, Shoeybi
et al., 2019; PLSC for faces).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from autopar.ir.lookups import is_lookup
from autopar.ir.training_graph import Head

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_ADD = (aten.add.Tensor, aten.add_.Tensor)
_MEAN, _SUM = 1, 2
"""How aten numbers the reductions of a loss."""


class _Other(Exception):
    """This softmax is not that of a head."""


def find_heads(
    graph: torch.fx.Graph, parameters: Mapping[torch.fx.Node, str], position: Mapping[torch.fx.Node, int]
) -> tuple[Head, ...]:
    """All heads of a graph. `parameters`: names of its trainable parameters, by placeholder."""
    found = []
    for softmax in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        try:
            found.append(_Finder(parameters, position).head(softmax))
        except _Other:
            continue
    return tuple(found)


class _Finder:
    """Reads one head off the graph; raises `_Other` where something else is computed."""

    def __init__(self, parameters: Mapping[torch.fx.Node, str], position: Mapping[torch.fx.Node, int]) -> None:
        self.parameters = parameters
        self.position = position
        self.replaced: list[torch.fx.Node] = []
        self.bias: torch.fx.Node | None = None
        self.log_sum: torch.fx.Node | None = None
        self.log_sum_gradient: torch.fx.Node | None = None

    def head(self, softmax: torch.fx.Node) -> Head:
        product = self._scores(softmax)
        hidden, turned = product.args[-2:]
        weight = turned.args[0]  # type: ignore[union-attr]
        loss, seed, target, reduction, ignored, gradient = self._loss(softmax)
        grad_hidden, weight_gradient = self._gradients(gradient, hidden, weight)
        _require(isinstance(hidden, torch.fx.Node) and weight in self.parameters)
        assert isinstance(weight, torch.fx.Node) and isinstance(hidden, torch.fx.Node)
        _require(all(u in (turned, grad_hidden) or is_lookup(u, weight) for u in weight.users))
        samples, width = hidden.meta["val"].shape
        return Head(
            weight=self.parameters[weight],
            bias=None if self.bias is None else self.parameters[self.bias],
            hidden=hidden.name,
            target=target.name,
            loss=loss.name,
            seed=seed.name,
            hidden_gradient=None if grad_hidden is None else grad_hidden.name,
            weight_gradient=weight_gradient.name,
            log_sum=None if self.log_sum is None else self.log_sum.name,
            log_sum_gradient=None if self.log_sum_gradient is None else self.log_sum_gradient.name,
            samples=int(samples),
            width=int(width),
            classes=int(weight.meta["val"].shape[0]),
            ignored=ignored,
            mean=reduction == _MEAN,
            dtype=str(softmax.meta["val"].dtype).removeprefix("torch."),
            begin=max(self.position.get(n, -1) for n in (hidden, target)),
            turn=max(self.position.get(n, -1) for n in (gradient, seed, self.log_sum_gradient) if n is not None),
            replaced=tuple(n.name for n in self.replaced),
        )

    def _scores(self, softmax: torch.fx.Node) -> torch.fx.Node:
        """The product from which the scores come, with views, a cast and a bias between."""
        node, dim = softmax.args[:2]
        _require(softmax.meta["val"].dim() == 2 and dim in (1, -1))
        user = softmax
        self.replaced.append(softmax)
        while True:
            _require(isinstance(node, torch.fx.Node) and set(node.users) == {user})
            assert isinstance(node, torch.fx.Node)
            self.replaced.append(node)
            user = node
            adds_bias = node.target in _ADD and self.bias is None and self._takes_bias(node.args[1])
            if node.target not in (*_VIEWS, aten._to_copy.default) and not adds_bias:
                break
            node = node.args[0]
        _require(user.target in (aten.mm.default, aten.addmm.default) and not user.kwargs)
        if user.target is aten.addmm.default:
            _require(self.bias is None and self._takes_bias(user.args[0]))
        _require(user.meta["val"].shape[-1] == softmax.meta["val"].shape[-1])  # no choice among what several rows score
        turned = user.args[-1]
        _require(isinstance(turned, torch.fx.Node) and turned.target is aten.t.default and set(turned.users) == {user})
        self.replaced.append(turned)  # type: ignore[arg-type]
        return user

    def _takes_bias(self, node: Any) -> bool:
        if node in self.parameters and node.meta["val"].dim() == 1 and len(node.users) == 1:
            self.bias = node
            return True
        return False

    def _loss(
        self, softmax: torch.fx.Node
    ) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node, int, int, torch.fx.Node]:
        """The loss, its gradient, the targets, reduction and ignored class, and the gradient of the scores."""
        users = {u.target: u for u in softmax.users}
        self.log_sum = users.pop(aten.sum.dim_IntList, None)
        kinds = (aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten._log_softmax_backward_data.default)
        _require(len(softmax.users) == 3 + (self.log_sum is not None) and set(users) == set(kinds))
        forward, backward, gradient = (users[k] for k in kinds)
        _, target, weights, reduction, ignored = forward.args
        _require(weights is None and reduction in (_MEAN, _SUM) and isinstance(target, torch.fx.Node))
        results = {u.args[1]: u for u in forward.users}
        above = self._above_softmax(backward, gradient, softmax)
        _require(0 in results and set(backward.users) == {above} and gradient.args[1] is softmax)
        seed = backward.args[0]
        _require(isinstance(seed, torch.fx.Node))
        if 1 in results:
            _require(set(results[1].users) <= {backward})
        self.replaced += [forward, backward, gradient, *results.values()]
        return results[0], seed, target, reduction, ignored, gradient  # type: ignore[return-value]

    def _above_softmax(self, backward: torch.fx.Node, gradient: torch.fx.Node, softmax: torch.fx.Node) -> torch.fx.Node:
        """Who reads the gradient of the loss without smoothing: the softmax's backward, or, with smoothing, the sum
        of that gradient and one number a sample, the same for all classes."""
        total = gradient.args[0]
        if self.log_sum is None:
            _require(total is backward)
            return gradient
        _require(list(self.log_sum.args[1:]) in ([[1]], [[-1]]) and not self.log_sum.kwargs)
        _require(isinstance(total, torch.fx.Node) and total.target in _ADD and set(total.users) == {gradient})
        assert isinstance(total, torch.fx.Node)
        others = [a for a in total.args if a is not backward]
        _require(len(total.args) == 2 and len(others) == 1 and not total.kwargs)
        spread = others[0]
        _require(isinstance(spread, torch.fx.Node) and spread.target is aten.expand.default)
        assert isinstance(spread, torch.fx.Node)
        column = spread.args[0]
        _require(
            isinstance(column, torch.fx.Node)
            and column.target is aten.unsqueeze.default
            and list(column.args[1:]) == [1]
        )
        assert isinstance(column, torch.fx.Node) and isinstance(column.args[0], torch.fx.Node)
        _require(set(spread.users) == {total} and set(column.users) == {spread})
        self.log_sum_gradient = column.args[0]
        self.replaced += [self.log_sum, total, spread, column]
        return total

    def _gradients(
        self, gradient: torch.fx.Node, hidden: Any, weight: Any
    ) -> tuple[torch.fx.Node | None, torch.fx.Node]:
        """Of what the layer is given, where that needs one, and of the weight; the bias's has no other reader."""
        of_hidden: list[torch.fx.Node] = []
        of_weight: list[torch.fx.Node] = []
        of_bias: list[torch.fx.Node] = []
        frontier = list(gradient.users)
        while frontier:
            node = frontier.pop()
            self.replaced.append(node)
            if node.target in _VIEWS or node.target in (aten._to_copy.default, aten.t.default):
                frontier += list(node.users)
            elif node.target is aten.mm.default and node.args[1] is weight:
                of_hidden.append(node)
            elif node.target is aten.mm.default and node.args[1] is hidden:
                of_weight.append(node)
            elif node.target is aten.sum.dim_IntList and self.bias is not None:
                of_bias.append(node)
                self.replaced += [u for u in node.users if u.target in _VIEWS]
                _require(all(u.target in _VIEWS or u.op == "output" for u in node.users))
            else:
                raise _Other
        _require(len(of_hidden) <= 1 and len(of_weight) == 1 and len(of_bias) == (self.bias is not None))
        return (of_hidden[0] if of_hidden else None), of_weight[0]


def _require(holds: bool) -> None:
    if not holds:
        raise _Other
