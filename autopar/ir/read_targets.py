"""How much a batch counts whose model runs eagerly, where its loss is a mean cross-entropy of targets that it holds.

No graph shows such a loss. As the model is looked at, the classes of a batch are followed, from its tensors to
`cross_entropy` or `nll_loss`, through what only reshapes them and through shifts by a few places. Behind that, the loss
may be scaled by a constant, and others may be added to it; a factor that is read from a tensor may be the number of
targets itself, and make the loss a sum. What is found counts any batch before its forward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.ir.batch import Batch
from autopar.ir.batch_weight import BatchWeight, UnreadWeight

aten = torch.ops.aten

UNIT = "targets that are not ignored"

_COPIES = frozenset({"contiguous", "to", "long", "int", "type", "clone", "detach", "cpu", "cuda"})
_RESHAPES = frozenset({"view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "permute", "transpose", "t"})
_MOST = 4
"""Places by which targets may be shifted or padded; larger numbers may be sizes of the batch."""
_LINEAR = frozenset(
    f"{name}Backward{i}"
    for name in ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "View", "Squeeze", "Clone", "Alias", "Mean", "Sum")
    for i in (0, 1)
)
"""What may lie between cross-entropies and the loss, by autograd's names."""
_FACTORS = frozenset({"MulBackward0", "DivBackward0"})
_CHOICES = frozenset({"masked_fill", "masked_fill_", "where", "masked_select"})
"""Functions by which a model leaves out some of its targets, besides an index that is a mask."""
_NUMBERS = frozenset({"item", "tolist", "numpy", "__array__", "__int__", "__float__", "__index__"})
"""Functions that make Python numbers of a tensor's values: a factor may be one of these."""

Cut = tuple[Any, ...]
"""What was done to the targets: `pad`, what is added to each dimension and the value; or `slice`, then each index, of
which slices are lists and an ellipsis is `...`."""


@dataclass(frozen=True)
class Targets:
    """Which targets a cross-entropy takes the mean over."""

    name: str
    """Of the batch's tensor that they come from."""
    ignored: int
    cuts: tuple[Cut, ...] = ()

    @staticmethod
    def of(found: dict[str, Any]) -> Targets:
        """From what JSON has made of it."""
        cuts = ((c[0], *(tuple(x) if isinstance(x, list) else x for x in c[1:])) for c in found["cuts"])
        return Targets(str(found["name"]), int(found["ignored"]), tuple(cuts))


@dataclass(frozen=True)
class TargetWeight(BatchWeight):
    """A batch counts by its targets that are not ignored."""

    name: str = ""
    """Of the batch's tensor that holds them."""
    structure: str = ""
    """Of the batches for which `reads` is right."""
    known: dict[str, BatchWeight] = field(default_factory=dict, compare=False, repr=False)
    """By the structure of other batches, how these count."""

    def of_structure(self, batch: Batch) -> BatchWeight:
        structure = batch.signature.structure
        if structure == self.structure:
            return self
        if structure not in self.known:
            self.known[structure] = _placed(self, batch)
        return self.known[structure]


def weight_of(batch: Batch, targets: Sequence[Targets], unread: str = "") -> BatchWeight:
    """How much batches like this one count, by what was read of the loss; their samples, where nothing was. `unread`:
    why a loss may count something else then."""
    found = [TargetWeight(UNIT, counted=_count(t), is_sum=True, name=t.name) for t in targets]
    return (
        _placed(replace(found[0], others=tuple(found[1:])), batch)
        if found
        else UnreadWeight("samples", is_sum=True, unread=unread)
    )


def _placed(weight: TargetWeight, batch: Batch) -> BatchWeight:
    """The weight of batches of this one's structure."""
    every, names, structure = [weight, *weight.others], batch.names, batch.signature.structure
    if batch.listed is not None or any(w.name not in names for w in every if isinstance(w, TargetWeight)):
        return UnreadWeight("samples", is_sum=weight.is_sum, is_mean=weight.is_mean)
    first, *others = (
        replace(w, reads=(("batch", names.index(w.name)),), structure=structure, others=(), known={})
        for w in every
        if isinstance(w, TargetWeight)
    )
    return replace(first, others=tuple(others))


def _count(targets: Targets) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    kept = graph.placeholder("target")
    for kind, *how in targets.cuts:
        if kind == "pad":
            kept = graph.call_function(F.pad, (kept, how[0]), {"value": how[1]})
        else:
            index: Any = tuple(slice(*i) if isinstance(i, tuple) else ... for i in how)
            kept = graph.call_function(operator.getitem, (kept, index))
    counts = graph.call_function(aten.ne.Scalar, (kept, targets.ignored))
    graph.output(graph.call_function(aten.sum.default, (counts,), {"dtype": torch.float64}))
    return torch.fx.GraphModule({}, graph, class_name="TargetWeight")


@dataclass(frozen=True)
class _Followed:
    tensor: torch.Tensor
    version: int
    targets: Targets
    reshaped: bool = False


class TargetReader(TorchFunctionMode):
    """While it is open, sees which tensors of a batch the loss takes as targets."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.found: tuple[Targets, ...] = ()
        """Of the loss's terms that are means over targets of the batch, in order, where the first term is."""
        self.unread = ""
        """Why the loss may be a mean over something that was not read, in words; empty where nothing shows that."""
        self._chosen: list[torch.Tensor] = []
        """Targets some of which the model has left out."""
        self._names = () if batch.listed is not None else batch.names
        self._followed: dict[int, _Followed] = {}
        self._losses: dict[Any, Targets] = {}
        """By node of the autograd graph."""
        self._scaled: set[Any] = set()
        """Nodes of the autograd graph that multiply or divide by what may differ from batch to batch."""
        self._made_numbers = False
        """Whether a tensor's values have become Python numbers."""

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Before a forward pass on a batch of these tensors."""
        self._losses, self._scaled, self._made_numbers = {}, set(), False
        self._chosen = []
        self._followed = {
            id(t): _Followed(t, t._version, Targets(name, 0))
            for name, t in zip(self._names, tensors, strict=False)
            if not t.is_floating_point() and not t.is_complex()
        }

    def end(self, loss: torch.Tensor) -> None:
        """Behind a forward pass."""
        nodes = [] if loss.grad_fn is None else _terms(loss.grad_fn, {*self._losses, *self._scaled})
        if not self.unread and not self._scaled.isdisjoint(nodes):
            self.unread = "it is multiplied or divided by what is computed from tensors, as the count of a mask"
        if self._losses:
            terms = [self._losses.get(node) for node in nodes]
            read = dict.fromkeys(t for t in terms if t is not None)
            self.found = tuple(read) if terms and terms[0] is not None else ()
        self._followed, self._losses, self._scaled, self._chosen = {}, {}, set(), []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        self._made_numbers |= name in _NUMBERS
        if func in (F.cross_entropy, F.nll_loss):
            self._note(found, *args, **kwargs)
        elif isinstance(found, torch.Tensor) and found.grad_fn is not None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if found.grad_fn.name() in _FACTORS and (len(tensors) > 1 or self._made_numbers):
                self._scaled.add(found.grad_fn)
        elif isinstance(found, torch.Tensor) and args and (of := self._of(args[0])) is not None:
            then = _after(of, name, found, args[1:], kwargs)
            if then is not None:
                self._followed[id(found)] = then
        if isinstance(found, torch.Tensor) and self._chooses(name, (*args, *kwargs.values())):
            self._chosen.append(found)
        return found

    def _chooses(self, name: str, args: Sequence[Any]) -> bool:
        """Whether a function makes of targets fewer of them, or only reshapes such ones."""
        if name in _COPIES or name in _RESHAPES:
            return self._is_chosen(args[0])
        by_mask = name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
        known = (self._followed.get(id(x)) for x in args if by_mask or name in _CHOICES)
        return any(of is not None and of.tensor is x for of, x in zip(known, args, strict=False))

    def _is_chosen(self, value: Any) -> bool:
        return any(value is t for t in self._chosen)

    def _note(
        self,
        loss: Any,
        scores: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        of, plain = self._of(target), weight is None and size_average is None and reduce is None
        if reduction == "mean" and weight is not None:
            self.unread = "its cross-entropy weights its classes"
        elif reduction == "mean" and self._is_chosen(target):
            self.unread = "its cross-entropy is given targets of which the model, or the loss, leaves some out"
        if of is not None and plain and reduction == "mean" and isinstance(loss, torch.Tensor) and loss.grad_fn:
            self._losses[loss.grad_fn] = replace(of.targets, ignored=ignore_index)

    def _of(self, value: Any) -> _Followed | None:
        """What is known of a tensor, unless it was written to since."""
        of = self._followed.get(id(value))
        return of if of is not None and of.tensor is value and value._version == of.version else None


def _after(of: _Followed, name: str, found: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> _Followed | None:
    """What is known of a tensor that a function has made of one that is followed."""
    if found.is_floating_point() or found.dtype == torch.bool:
        return None
    cut: Cut | None = None
    if name == "__getitem__":
        cut = _sliced(args[0])
    elif name == "pad":
        cut = _padded(*args, **kwargs)
    elif name in _COPIES or name in _RESHAPES:
        return _Followed(found, found._version, of.targets, of.reshaped or name in _RESHAPES)
    if cut is None or of.reshaped:
        return None
    return _Followed(found, found._version, replace(of.targets, cuts=(*of.targets.cuts, cut)))


def _sliced(index: Any) -> Cut | None:
    found: list[Any] = []
    for i in index if isinstance(index, tuple) else (index,):
        if i is Ellipsis:
            found.append("...")
        elif isinstance(i, slice) and i.step is None and _is_shift(i.start) and _is_shift(i.stop):
            if i.stop is not None and i.stop >= 0:
                return None
            found.append((i.start, i.stop))
        else:
            return None
    return ("slice", *found)


def _padded(pad: Any, mode: str = "constant", value: Any = None) -> Cut | None:
    if mode != "constant" or value is None or not all(_is_shift(p) for p in pad):
        return None
    return ("pad", tuple(pad), value)


def _is_shift(x: Any) -> bool:
    return x is None or (type(x) is int and -_MOST <= x <= _MOST)


def _terms(node: Any, known: Collection[Any]) -> list[Any]:
    """The nodes from which a loss follows by sums and factors, in the order in which they are added."""
    found, frontier = [], [node]
    while frontier:
        node = frontier.pop()
        if node in known or node.name() not in _LINEAR:
            found.append(node)
        else:
            frontier += [n for n, _ in reversed(node.next_functions) if n is not None]
    return found
