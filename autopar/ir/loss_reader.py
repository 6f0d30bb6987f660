"""Reads a loss off the joint graph: the rules of `autopar.ir.loss_terms`, operator by operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from autopar.ir.loss_terms import (
    Count,
    Fixed,
    Rows,
    Term,
    Total,
    Unknown,
    Value,
    added,
    averaged,
    divided,
    elements,
    multiplied,
    scaled,
    summed,
)

_NONE, _MEAN, _SUM = 0, 1, 2
"""How aten numbers the reductions of a loss (`at::Reduction`)."""
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand", "permute", "transpose", "t"})
_CASTS = frozenset({"_to_copy", "clone", "alias", "detach"})
_ONE_SOURCE = frozenset({"select", "slice", "contiguous", "gather", "index", "index_select", "repeat", "flip", "roll"})
_PARTS = frozenset({"select", "slice", "unbind", "split", "split_with_sizes", "cat", "stack"})
_LINEAR = _VIEWS | _CASTS | _PARTS | {"contiguous", "lift_fresh", "nan_to_num", "neg"}
"""Operators that return what they are given, parts of it, several such in one, or its negative."""
_FACTORIES = frozenset({"full", "ones", "zeros", "empty", "arange", "scalar_tensor"})
_FACTORIES |= {f"{name}_like" for name in _FACTORIES} | {f"new_{name}" for name in _FACTORIES}
_ELEMENTWISE_LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"})
_ELEMENTWISE_LOSSES |= {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_SAMPLE_LOSSES = frozenset(["multi_margin_loss", "multilabel_margin_loss_forward"])
"""Losses of which a sample, or the batch's only one, has one number."""
_NLL = ("nll_loss_forward", "nll_loss2d_forward")
_NOT = ("bitwise_not", "logical_not")


class Reader:
    """Finds what the loss of a graph is to its batch. `kinds`: of each placeholder, `parameter`, `buffer`, `batch` or
    `tangent`. `samples`: in the batch, at least one. `names`: of the batch's tensors, for people."""

    def __init__(
        self, kinds: dict[torch.fx.Node, str], samples: int, names: Mapping[torch.fx.Node, str] = MappingProxyType({})
    ) -> None:
        sizes = {_val(n).shape[0] for n, kind in kinds.items() if kind == "batch" and _val(n).dim()}
        self.sizes = (samples, *sorted((n for n in sizes if n and n != samples), reverse=True))
        """How many samples there may be: other tensors than the first may know better, as offsets of bags do."""
        self.kinds = kinds
        self.names = names
        self.by_model: set[torch.fx.Node] = set()
        """Nodes that depend on parameters or random numbers, and not on the batch and buffers alone."""
        self._values: dict[torch.fx.Node, Value] = {}
        self._keys: dict[Hashable, int] = {}
        self._key_of: dict[torch.fx.Node, int] = {}
        rules: list[tuple[Iterable[str], Callable[[torch.fx.Node], Value]]]
        rules = [(("add", "sub"), self._sum_of_two), (("rsub",), self._difference), (("mul",), self._product)]
        rules += [(("div",), self._quotient), (("reciprocal",), self._reciprocal), (("sum", "mean"), self._reduced)]
        rules += [(("clamp", "clamp_min", "maximum"), self._bounded), (_NLL, self._nll), (_LINEAR, self._linear)]
        rules += [(_FACTORIES, self._made), (_ELEMENTWISE_LOSSES | _SAMPLE_LOSSES, self._loss)]
        self._rules: dict[str, Callable[[torch.fx.Node], Value]] = {n: rule for names, rule in rules for n in names}

    def read(self, loss: torch.fx.Node) -> Value:
        """What the loss is; `Unknown` where it is neither a sum nor a mean over the batch, as far as is seen."""
        needed, frontier = {loss}, [loss]
        while frontier:
            more = [n for n in frontier.pop().all_input_nodes if n not in needed]
            needed.update(more)
            frontier += more
        for node in loss.graph.nodes:
            if node in needed:
                self._visit(node)
        return self._values[loss]

    def _visit(self, node: torch.fx.Node) -> None:
        inputs = node.all_input_nodes
        if self.kinds.get(node) in ("parameter", "tangent") or _is_random(node) or not self.by_model.isdisjoint(inputs):
            self.by_model.add(node)
        self._key_of[node] = self._key(node)
        value = self._value(node)
        if isinstance(value, Term):
            total = value.total or Total(node, self._key_of[node])
            value = replace(value, total=None if node in self.by_model else total)
        self._values[node] = value

    def _value(self, node: torch.fx.Node) -> Value:
        if node.op != "call_function":
            return self._other(node) if self.kinds.get(node) == "batch" else Fixed(_number(node))
        name = _name(node)
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            if _name(source) in (*_LINEAR, *_NLL, *_SAMPLE_LOSSES):
                return self._values[source]
            return self._other(node)
        if str(node.target).startswith("autopar.sum_over_ranks"):
            return Fixed()  # of batch normalization: the global batch's, on each rank
        inputs = [self._values[i] for i in node.all_input_nodes]
        if inputs and all(isinstance(v, Fixed) and v.per is None for v in inputs) and not _is_random(node):
            return Fixed()
        if name in self._rules:
            return self._rules[name](node)
        return self._pointwise(node) if torch.Tag.pointwise in _tags(node) else self._other(node)

    def _of(self, argument: Any) -> Value:
        if isinstance(argument, torch.fx.Node):
            return self._values[argument]
        return Fixed(float(argument)) if isinstance(argument, (int, float)) else Fixed()

    def _sum_of_two(self, node: torch.fx.Node) -> Value:
        a, b = (self._of(x) for x in node.args[:2])
        return added(node, a, scaled(b, _number(node.kwargs.get("alpha", 1)), self.sizes))

    def _difference(self, node: torch.fx.Node) -> Value:
        """The second less the first; a number of elements less those that are counted are those that are not."""
        a, b = (self._of(x) for x in node.args[:2])
        if isinstance(a, Term) and a.adds and a.total is not None and isinstance(b, Fixed) and b.number == a.size:
            return Term(None, True, a.size)
        return added(node, a, b)

    def _product(self, node: torch.fx.Node) -> Value:
        a, b = (self._of(x) for x in node.args[:2])
        return multiplied(node, a, b, self.sizes)

    def _quotient(self, node: torch.fx.Node) -> Value:
        if node.kwargs.get("rounding_mode") is not None:
            return self._pointwise(node)
        a, b = (self._of(x) for x in node.args[:2])
        return divided(node, a, b, self.sizes)

    def _reciprocal(self, node: torch.fx.Node) -> Value:
        return divided(node, Fixed(1.0), self._of(node.args[0]), self.sizes)

    def _bounded(self, node: torch.fx.Node) -> Value:
        """A count that is kept from being 0 is still that count."""
        terms = [v for v in map(self._of, node.args) if not isinstance(v, Fixed)]
        term = terms[0] if len(terms) == 1 and isinstance(terms[0], Term) else None
        rest = [_number(a) for a in (*node.args[1:], *node.kwargs.values()) if a is not None]
        low = len(rest) == 1 and (rest[0] is None or 0 < rest[0] <= 1)
        if term is None or term.total is None or not low or "max" in node.kwargs or len(node.args) > 2:
            return self._pointwise(node)
        return replace(term, bounded=True)

    def _linear(self, node: torch.fx.Node) -> Value:
        if not node.all_input_nodes:  # of a number
            return self._of(node.args[0])
        first, *rest = (self._values[i] for i in node.all_input_nodes)
        for value in rest:
            if isinstance(first, (Rows, Fixed)) and isinstance(value, (Rows, Fixed)):
                first = first if isinstance(first, Rows) else value
            else:
                first = added(node, first, value)
        if not isinstance(first, Rows) or self.sizes[0] == 1:  # what is taken out of the only sample is that sample's
            return first
        if isinstance(_val(node), torch.Tensor) and not self._has_samples(node):
            return Unknown(node, "takes single samples out of the batch")
        return first

    def _reduced(self, node: torch.fx.Node) -> Value:
        source = node.args[0]
        value = self._of(source)
        if not isinstance(value, Rows):
            return value
        shape = _val(source).shape
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        dims = list(range(len(shape)))
        if isinstance(given, Sequence) and given:
            dims = [dims[d] for d in given if isinstance(d, int)]
        if self._dim(shape) not in dims:
            return value
        if _name(node) == "sum":
            return summed(value)
        return averaged(node, value, math.prod(shape[d] for d in dims))

    def _loss(self, node: torch.fx.Node) -> Value:
        """A loss with an argument that says how it is reduced."""
        one = self._pointwise(node)
        reduction = self._argument(node, "reduction")
        if not isinstance(one, Rows) or reduction == _NONE:
            return one
        shapes = [_val(a).shape for a in node.args[:2]]
        if _name(node) in _SAMPLE_LOSSES:
            count = shapes[0][0] if len(shapes[0]) > 1 else 1
        else:
            count = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        rows = Rows(max(one.size, count))
        return summed(rows) if reduction == _SUM else averaged(node, rows, count)

    def _nll(self, node: torch.fx.Node) -> Value:
        scores, target, class_weight, reduction, ignored = node.args
        assert isinstance(target, torch.fx.Node) and isinstance(ignored, int)
        for value in map(self._of, (scores, target)):
            if not isinstance(value, (Rows, Fixed)):
                return value if isinstance(value, Unknown) else Unknown(node, "classifies values of the whole batch")
        rows = Rows(_val(target).numel())
        if reduction != _MEAN:
            return rows if reduction == _NONE else summed(rows)
        if class_weight is not None:
            assert isinstance(class_weight, torch.fx.Node)
            if class_weight in self.by_model or target in self.by_model:
                return Unknown(node, "weights its classes, or chooses its targets, by what is learned")
            key: Hashable = ("classes", self._key_of[target], self._key_of[class_weight], ignored)
            count = Count(key, "class weights of the targets", 1.0, target, ignored, class_weight, node)
        elif target in self.by_model:
            if ignored >= 0 or not _are_indices(target):
                return Unknown(node, "leaves out targets by what is drawn or learned")
            count = elements(rows.size)
        else:
            kept = self._id(("not", self._id(("eq", self._arguments((target, ignored))))))
            key = (self._id(("sum", ((kept,),))), 1.0)
            count = Count(key, "targets that are not ignored", 1.0, target, ignored, nothing=node)
        return Term((count,), size=rows.size)

    def _made(self, node: torch.fx.Node) -> Value:
        """A constant that is made as large as the batch, as masks of ones are, belongs to the samples."""
        value = _val(node)
        if value.numel() > 1 and self._has_samples(node):
            return Rows(value.numel())
        fill = {"full": 1, "scalar_tensor": 0}.get(_name(node))
        return Fixed(_number(node.args[fill]) if fill is not None else 0.0 if _name(node) == "zeros" else None)

    def _pointwise(self, node: torch.fx.Node) -> Value:
        inputs = [self._values[i] for i in node.all_input_nodes]
        for value in inputs:
            if isinstance(value, Unknown):
                return value
        rows = [v for v in inputs if isinstance(v, Rows)]
        if any(isinstance(v, Term) or (isinstance(v, Fixed) and v.per is not None) for v in inputs):
            what = (
                "compares each sample with a value of the whole batch"
                if rows
                else (f"passes a value of the whole batch through '{_name(node)}'")
            )
            return Unknown(node, what)
        pers = {v.per for v in rows if v.per is not None}
        if len(pers) > 1 or (pers and _name(node) not in ("masked_fill", "where")):
            return Unknown(node, f"passes shares of the whole batch through '{_name(node)}'")
        return Rows(max((v.size for v in rows), default=1), next(iter(pers), None))

    def _other(self, node: torch.fx.Node) -> Value:
        """What an operator of the model returns: of it, a dimension of the batch's size is all that is looked at."""
        value = _val(node)
        if not isinstance(value, torch.Tensor):
            return Rows(1)
        if self._has_samples(node):
            return Rows(value.numel())
        if _is_random(node) and all(isinstance(self._values[i], Fixed) for i in node.all_input_nodes):
            return Fixed()
        if node in self.names:
            return Unknown(node, f"reads {self.names[node]}, which has no dimension of the samples")
        return Unknown(node, f"computes one value of the whole batch by '{_name(node) or node.name}'")

    def _has_samples(self, node: torch.fx.Node) -> bool:
        return self._dim(_val(node).shape) is not None

    def _dim(self, shape: Sequence[int]) -> int | None:
        """The dimension of the samples: the first one, unless only another fits; `None` where none fits."""
        for samples in self.sizes:
            multiples = [i for i, size in enumerate(shape) if size and size % samples == 0]
            exact = [i for i in multiples if shape[i] == samples]
            if 0 in exact:
                return 0
            if multiples:
                return exact[0] if exact and (len(shape) > 2 or 0 not in multiples) else multiples[0]
        return None

    def _key(self, node: torch.fx.Node) -> int:
        """A number for what a node computes: equal for equal computations, whatever the dtype."""
        name = _name(node)
        if node.op != "call_function" or _is_random(node):
            return self._id((node.op, str(node.target), node.name if node.op != "get_attr" else ""))
        first = node.args[0] if node.args else None
        if name in _CASTS and isinstance(first, torch.fx.Node):
            return self._key_of[first]
        if name == "ne":
            return self._id(("not", self._id(("eq", self._arguments(node.args)))))
        if name in _NOT and isinstance(first, torch.fx.Node):
            return self._id(("not", self._key_of[first]))
        if name in ("eq", "sum") and len(node.args) < 3:
            return self._id((name, self._arguments(node.args)))
        return self._id((str(node.target), self._arguments(node.args), self._arguments(node.kwargs)))

    def _id(self, what: Hashable) -> int:
        return self._keys.setdefault(what, len(self._keys))

    def _arguments(self, a: Any) -> Hashable:
        if isinstance(a, torch.fx.Node):
            return (self._key_of[a],)
        if isinstance(a, (tuple, list)):
            return tuple(self._arguments(x) for x in a)
        if isinstance(a, dict):
            return tuple((k, self._arguments(v)) for k, v in sorted(a.items()))
        return repr(a)

    @staticmethod
    def _argument(node: torch.fx.Node, name: str) -> Any:
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        place = next(i for i, a in enumerate(schema) if a.name == name)
        return node.args[place] if place < len(node.args) else node.kwargs.get(name, schema[place].default_value)


def _name(node: torch.fx.Node) -> str:
    """The operator's name: `add` for aten's add.Tensor, and for add_.Tensor too."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        name = str(node.target._schema.name).removeprefix("aten::")
        return name.removesuffix("_")
    return ""


def _tags(node: torch.fx.Node) -> Sequence[torch.Tag]:
    return node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()


def _is_random(node: torch.fx.Node) -> bool:
    """Whether it draws random numbers, or is no operator of PyTorch's own, so that this cannot be told."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return torch.Tag.nondeterministic_seeded in _tags(node) or not _name(node)


def _are_indices(node: Any, depth: int = 20) -> bool:
    """Whether its numbers are places in a dimension, counts or flags, in another form perhaps: none is negative."""
    if not isinstance(node, torch.fx.Node):
        return isinstance(node, (int, float)) and node >= 0
    value, name, first = _val(node), _name(node), node.args[0] if node.args else None
    if depth == 0:
        return False
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
        return True
    if name in _VIEWS | _CASTS | _ONE_SOURCE:
        return _are_indices(first, depth - 1)
    if node.target is operator.getitem:
        return bool(node.args[1] == 1) and _name(node.all_input_nodes[0]) in ("max", "min", "topk", "sort", "mode")
    if name in ("cat", "stack"):
        return all(_are_indices(part, depth - 1) for part in first)  # type: ignore[union-attr]
    if name in ("where", "masked_fill"):
        chosen = node.args[1:3] if name == "where" else (first, node.args[2])
        return all(_are_indices(part, depth - 1) for part in chosen)
    if name in ("add", "mul"):
        return all(_are_indices(part, depth - 1) for part in node.args[:2])
    if name == "randint":
        return len(node.args) < 3 or _are_indices(first, depth - 1)
    return name in ("argmax", "argmin", "argsort", "multinomial", "randperm", "bucketize", "searchsorted", "arange")


def _val(node: Any) -> Any:
    return node.meta.get("val")


def _number(a: Any) -> float | None:
    """A number, or a size that the graph is given."""
    value = _val(a) if isinstance(a, torch.fx.Node) else a
    return float(value) if isinstance(value, (int, float)) else None
