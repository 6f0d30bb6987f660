"""Whether all ranks compute the same in a step, which they compare once, before the first one.

On batches of the same shapes, the captured graphs are compared operator by operator, with every constant, but for whole
numbers where ranks take each other's samples: labels may follow from a rank's place among all. Not compared is the
order of operators that do not read each other, which Python's sets of names decide in each process. On batches of other
shapes, views, counts and sizes differ rightly. There, graphs are compared by what depends on shapes rarely: which
operators they have, with which factors. Where these differ, each rank captures the model once more, on its batch cut or
repeated to the shapes of rank 0's, and what it then computes is compared whole.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.fx

from autopar.errors import AutoparWarning, PlanMismatchError
from autopar.ir.aliases import is_view
from autopar.ir.batch import Batch, flatten
from autopar.ir.reuse import COMMUTATIVE, FUNCTIONAL
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.job.process_group import Rendezvous

aten = torch.ops.aten

Capture = Callable[[Batch], TrainingGraph]

_HOW = "All ranks must build the same model, with the same settings and loss"


@dataclass(frozen=True)
class Described:
    """What one rank computes, as ranks tell each other."""

    shapes: list[str]
    """Of all inputs of the graph, parameters among them."""
    nodes: str
    """A digest of every operator, with its constants and what it reads. The order of operators, and the order in which
    gradients are added up, do not count: a model that goes through a set of names has others in each process."""
    loose: list[str]
    """Operators other than views, with constants that are not sizes."""
    batch: list[list[int]]
    """Shapes of the batch's tensors."""
    form: str
    """All else of the batch: its structure, dtypes, numbers of dimensions, layouts and constants."""


def compare_steps(rendezvous: Rendezvous, graph: TrainingGraph, batch: Batch, capture: Capture) -> None:
    """Raises `PlanMismatchError` where ranks compute different things on batches of one shape. Warns where they do
    on batches of other shapes. By all ranks together. `capture`: captures the model on another batch."""
    rank = rendezvous.group.rank
    if rendezvous.group.world_size == 1 or graph.joint is None or graph.eager:
        return
    mine = _described(graph, batch)
    everyone = [Described(**json.loads(t)) for t in rendezvous.exchange("step", json.dumps(asdict(mine)))]
    if (unlike := unlike_ranks(everyone, rank)) is not None:  # on all ranks, as others would wait for these two
        one, other = unlike
        raise PlanMismatchError(
            f"rank {one} and rank {other} compute different things on batches of the same shapes; they differ in "
            f"{_differences(everyone[one], everyone[other])}. {_HOW}. A model that asks for its rank, as one that "
            'gathers samples itself, takes autopar.gather instead, or runs eagerly with capture="never"'
        )
    if all(theirs.loose == mine.loose for theirs in everyone):
        return
    again = mine if mine.shapes == everyone[0].shapes else _on_shapes_of(everyone[0], mine, batch, capture)
    texts = rendezvous.exchange("step on the shapes of rank 0", json.dumps(again and asdict(again)))
    others = [None if t == "null" else Described(**json.loads(t)) for t in texts]
    for other, seen in enumerate(others):
        if again is not None and seen is not None and seen.nodes != again.nodes:
            warnings.warn(
                f"rank {rank} and rank {other} seem to compute different things, also on batches of the same shapes; "
                f"they differ in {_differences(again, seen)}. Their gradients are summed all the same, as with "
                f"DistributedDataParallel. {_HOW}",
                AutoparWarning,
                stacklevel=4,
            )
            return


def unlike_ranks(everyone: Sequence[Described], rank: int) -> tuple[int, int] | None:
    """Two ranks that compute different things on batches of the same shapes, `rank` with another one where it is one of
    them; `None` where there are none."""
    first: dict[tuple[str, ...], dict[str, int]] = {}  # by shapes, then by what is computed: the first such rank
    for r, described in enumerate(everyone):
        first.setdefault(tuple(described.shapes), {}).setdefault(described.nodes, r)
    mine = everyone[rank]
    for nodes, other in first[tuple(mine.shapes)].items():
        if nodes != mine.nodes:
            return rank, other
    return next(((a, b) for a, b, *_ in (of.values() for of in first.values() if len(of) > 1)), None)


def _on_shapes_of(first: Described, mine: Described, batch: Batch, capture: Capture) -> Described | None:
    """What this rank computes on batches of the shapes that rank 0 has; `None` where that cannot be known."""
    if mine.form != first.form or not all(t.is_contiguous() and t.numel() for t in batch.tensors):
        return None
    tensors = tuple(_of_shape(t, shape) for t, shape in zip(batch.tensors, first.batch, strict=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # has been said of this rank's own batch
            other = flatten(replace(batch, tensors=tensors).rebuild(tensors))
            found = _described(capture(other), other)
    except Exception:  # values that do not go with these shapes, such as lengths, may fail in the user's code
        return None
    return found if found.shapes == first.shapes else None


def _of_shape(t: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor's values, cut or repeated along each dimension."""
    t = t.detach()
    for dim, size in enumerate(shape):
        t = t.index_select(dim, torch.arange(size, device=t.device) % t.shape[dim])
    return t


def _described(graph: TrainingGraph, batch: Batch) -> Described:
    assert graph.joint is not None
    nodes = [n for n in graph.joint.module.graph.nodes if not _is_one_zero(n)]
    known: dict[torch.fx.Node, str] = {}
    terms: dict[torch.fx.Node, list[str]] = {}  # the digests of what each sum adds up
    shapes: list[str] = []
    loose: set[str] = set()
    gathers = graph.joint.gathers  # then a rank's samples have a place among all, as labels that follow from its number

    def told(x: Any) -> Any:
        if isinstance(x, torch.fx.Node):
            return known[x]
        return "whole" if gathers and type(x) is int else x

    for node in nodes:
        if node.op == "placeholder":
            text = f"input {len(shapes)}"
            shapes.append(_shape(node))
        elif _is_zeros(node):
            text = f"zeros {_shape(node)}"
        elif node.op == "get_attr":
            text = f"constant {_shape(node)}"
        else:
            target: Any = FUNCTIONAL.get(node.target, node.target)
            args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), told)
            if _is_sum(node):
                args = terms[node] = sorted(t for added in node.args for t in terms.get(added, [known[added]]))
            elif target in COMMUTATIVE:
                args = sorted(map(str, args))
            text = f"{_name(target)} {args} {kwargs}"
            if node.op == "call_function" and not is_view(node):
                loose.add(f"{_name(target)} {_factors(node, not gathers)}".rstrip())
        known[node] = _digest(text)
    tensors = [f"{t.dtype} {t.dim()} {t.is_contiguous()}" for t in batch.tensors]
    form = [batch.signature.structure, tensors, [repr(c) for c in batch.constants]]
    ends = sorted(text for node, text in known.items() if not node.users)  # the output, and what nobody reads
    digest = _digest("\n".join(ends))
    return Described(shapes, digest, sorted(loose), [[*t.shape] for t in batch.tensors], json.dumps(form))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shape(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""


def _is_sum(node: torch.fx.Node) -> bool:
    """Whether a node adds two tensors of one shape and format."""
    if node.target not in (aten.add.Tensor, aten.add_.Tensor) or node.kwargs:
        return False
    return all(isinstance(x, torch.fx.Node) and _shape(x) == _shape(node) for x in node.args)


def _is_one_zero(node: torch.fx.Node) -> bool:
    """Whether a node makes a zero that is expanded to the tensors that are read."""
    if node.target != aten.zeros.default or node.args[0] != []:
        return False
    return bool(node.users) and all(u.target == aten.expand.default for u in node.users)


def _is_zeros(node: torch.fx.Node) -> bool:
    """Whether a node is what forward-mode differentiation has for a tangent that is nothing: by what else a process has
    traced before, PyTorch makes it in one or the other way. [Empirical, torch 2.13]"""
    if node.target == aten._efficientzerotensor.default:
        return True
    return node.target == aten.expand.default and _is_one_zero(node.all_input_nodes[0])


def _factors(node: torch.fx.Node, with_numbers: bool) -> str:
    """The constants of an operator that are no sizes: fractions, flags and words; whole numbers only where elements are
    computed with them, other than by a division, as by a count, and `with_numbers`."""
    target: Any = node.target
    counts = torch.Tag.pointwise in getattr(target, "tags", ()) and "div" not in _name(target)
    kinds = (float, bool, str, complex) + ((int,) if counts and with_numbers else ())
    constants = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, kinds)]
    return ", ".join(map(repr, constants))


def _differences(mine: Described, theirs: Described) -> str:
    found = [x for x in mine.loose if x not in theirs.loose], [x for x in theirs.loose if x not in mine.loose]
    here, there = (", ".join(some[:3]) for some in found)
    if not here and not there:
        return "a constant, as a probability or a factor"
    return f"{here or 'nothing'} here and {there or 'nothing'} there"


def _name(target: Any) -> str:
    """An operator by name, without the address that it has in one process."""
    return str(getattr(target, "__qualname__", target)) if isinstance(target, FunctionType) else str(target)
