"""Which parts of a step's graph are compiled: maximal runs of tensor operators between what runs as it is.

Collectives, waits, updates and random operators stay where the plan has them: a region ends before each, so that
nothing is sent later than planned. Two kinds of nodes let a region go on: random operators that need nothing of it run
before it, in their own order, and a wait or an update of which no node reads the result runs behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from autopar.backends import collectives
from autopar.ir.aliases import is_view
from autopar.ir.simplify import dropout_noise
from autopar.ops.updates import Received, Step
from autopar.runtime.compiling.passes import shaped_noise
from autopar.runtime.compiling.repeats import offsets_of_cuts, repeats

aten = torch.ops.aten

_EAGER_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CREATE = {"arange", "full", "zeros", "ones", "scalar_tensor", "eye"}
_COPIES = {"clone", "_to_copy", "lift_fresh_copy", "where", "expand"}
_CALLS = {"product", "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
_NARROW = {torch.float16, torch.bfloat16}
_MOST_FORMED_AGAIN = 24
"""Operators of one chain that is computed again rather than kept."""


@dataclass(eq=False)
class Region:
    """Operators that are compiled as one."""

    index: int
    nodes: list[torch.fx.Node] = field(default_factory=list)
    behind: list[torch.fx.Node] = field(default_factory=list)
    """What runs behind it, though it stands within it."""
    inputs: list[torch.fx.Node] = field(default_factory=list)
    body: list[torch.fx.Node] = field(default_factory=list)
    """What is computed, in order: nodes of its own that are needed, and those of earlier regions that are formed
    again."""
    outputs: list[torch.fx.Node] = field(default_factory=list)


Piece = Region | torch.fx.Node


class Partition:
    """The pieces of a graph, in the order in which they run."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._module = module
        self._order = [n for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        self._computes: dict[torch.fx.Node, bool] = {}
        self._may_wait: dict[torch.fx.Node, bool] = {}
        kept = {_base_of(n) for n in self._order if _reads_from_offset(n)}
        for node in self._order:
            self._computes[node] = node not in kept and _computes(node, self._computes)
        for node in reversed(self._order):
            self._may_wait[node] = self._is_late(node)
        self.home: dict[torch.fx.Node, Region] = {}
        """Of every operator that is compiled."""
        self.pieces: list[Piece] = []
        self._scan(self._cuts())
        self._outputs_of_graph = set(module.graph.output_node().all_input_nodes)
        self._wanted: set[torch.fx.Node] = set()
        """What later regions take."""
        for region in reversed([p for p in self.pieces if isinstance(p, Region)]):
            self._resolve(region)

    def is_outer_view(self, node: torch.fx.Node) -> bool:
        """Whether a node is a view of a value that no region computes: it is made where it is read."""
        return self._computes.get(node, False) and node not in self.home

    def _cuts(self) -> set[torch.fx.Node]:
        """Where regions begin so that equal layers are equal regions."""
        work = [n for n in self._order if self._computes[n] and not is_attached(n)]
        found = repeats([_signature(n) for n in work], _broken(work))
        first = {work[i] for run in found for i in run.starts if i < len(work)}
        ends = self._scan(first)
        place = {n: i for i, n in enumerate(work)}
        within = sorted({place[n] for n in ends if n in place})
        return {work[i] for i in offsets_of_cuts(found, within) if i < len(work)}

    def _scan(self, cuts: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
        """Fills `pieces` and `home`; returns the operators at which a region begins since something runs before."""
        begins, forced = set(cuts), []
        self.pieces, self.home = [], {}
        current: Region | None = None
        count, was_ended = 0, False
        for node in self._order:
            if not self._computes[node]:
                if current is not None and self._goes_before(node, current):
                    self.pieces.insert(len(self.pieces) - 1, node)
                elif current is not None and self._may_wait[node]:
                    current.behind.append(node)
                else:
                    self.pieces.append(node)
                    current, was_ended = None, True
                continue
            if is_attached(node):
                source = node.args[0]
                if source in self.home:
                    self.home[node] = self.home[source]
                    self.home[node].nodes.append(node)
                continue
            if was_ended:
                forced.append(node)
            if current is None or node in begins:
                current = Region(count)
                self.pieces.append(current)
                count += 1
            was_ended = False
            self.home[node] = current
            current.nodes.append(node)
        return forced

    def _goes_before(self, node: torch.fx.Node, current: Region) -> bool:
        return _is_random(node) and all(self.home.get(a) is not current for a in node.all_input_nodes)

    def _is_late(self, node: torch.fx.Node) -> bool:
        """Whether a node only completes what was begun, and nothing else waits for it."""
        if any(not self._may_wait.get(u, False) for u in node.users):
            return False
        if node.op == "call_module":
            return isinstance(self._module.get_submodule(str(node.target)), (Step, Received))
        return node.target in (collectives.wait, collectives.sum_parts) or (
            node.target is operator.getitem and bool(node.users)
        )

    def _resolve(self, region: Region) -> None:
        """Fills in what a region computes, takes and returns; later regions know already what they take."""
        own = set(region.nodes)
        region.outputs = [n for n in region.nodes if self._is_read_outside(n, region)]
        done: set[torch.fx.Node] = set()
        taken: dict[torch.fx.Node, None] = {}
        body: list[torch.fx.Node] = []

        def need(node: torch.fx.Node) -> None:
            stack = [(node, False)]
            while stack:
                n, ready = stack.pop()
                if ready:
                    body.append(n)
                elif n not in done:
                    done.add(n)
                    if n in own or (self._computes.get(n, False) and self._is_formed_here(n, region)):
                        stack.append((n, True))
                        stack.extend((a, False) for a in reversed(n.all_input_nodes))
                    else:
                        taken[n] = None

        for node in region.outputs:
            need(node)
        place = {n: i for i, n in enumerate(self._order)}
        region.body = sorted(body, key=lambda n: place[n])
        region.inputs = list(taken)
        self._wanted.update(taken)

    def _is_read_outside(self, node: torch.fx.Node, region: Region) -> bool:
        if node in self._outputs_of_graph:
            return True
        for user in node.users:
            if user in self._computes and not self._computes[user]:
                return True
        return node in self._wanted

    def _is_formed_here(self, node: torch.fx.Node, region: Region) -> bool:
        """Whether a region forms a value of an earlier one again: a view, or cheap operators of what it has anyway."""
        if is_attached(node):
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            return is_true_view(node) or (node.target is operator.getitem and is_true_view(source))
        if self._is_kept(node):
            return False
        chain: set[torch.fx.Node] = set()
        leaves: set[torch.fx.Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n in chain or n in leaves:
                continue
            if self._computes.get(n, False) and (is_true_view(n) or not self._is_kept(n)):
                chain.add(n)
                stack.extend(n.all_input_nodes)
            else:
                leaves.add(n)
            if len(chain) > _MOST_FORMED_AGAIN:
                return False
        if any(n.op == "placeholder" and not _is_of_batch(n) for n in leaves):
            return False  # a parameter may have been updated since
        new = sum(_bytes(n) for n in leaves if not self._is_alive(n, region))
        return new <= _bytes(node)

    def _is_kept(self, node: torch.fx.Node) -> bool:
        """Whether a value is in memory anyway: it is not elementwise, or an operator that is not reads it."""
        if not _is_cheap(node):
            return True
        return any(not is_fusible(r) for r in _direct_readers(node) if r.op != "output") or any(
            not self._computes.get(r, False) for r in _direct_readers(node)
        )

    def _is_alive(self, node: torch.fx.Node, region: Region) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        homes = [self.home.get(r) for r in _direct_readers(node)]
        return any(h is not None and h.index >= region.index for h in homes)


def _computes(node: torch.fx.Node, known: dict[torch.fx.Node, bool]) -> bool:
    """Whether an operator can be compiled: on dense tensors of known shapes, without an effect, and not random. What
    ranks do together is not, though it looks like compute: one rank may run a region twice, to prove it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return known.get(node.args[0], False)  # type: ignore[arg-type]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not (target.namespace in ("aten", "prims") or _is_own(target)):
        return False
    if target._schema.is_mutable or _is_random(node) or _EAGER_TAGS & set(target.tags):
        return False
    if _reads_from_offset(node) or _has_narrow_statistics(node):
        return False
    return all(_is_plain(n.meta.get("val")) for n in (node, *node.all_input_nodes))


def _is_own(target: torch._ops.OpOverload) -> bool:
    """Whether it is a product of matrices by another library, which is registered where that is faster."""
    return bool(target._schema.name == "autopar::product")


def _reads_from_offset(node: torch.fx.Node) -> bool:
    """Whether it takes elements from a place in memory, not from where its input begins: compiled code knows no
    other."""
    if _name(node) not in ("as_strided", "as_strided_copy"):
        return False
    return (node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")) is not None


def _base_of(node: torch.fx.Node) -> torch.fx.Node:
    """What has made the memory that an operator reads from such a place."""
    base = node.args[0]
    assert isinstance(base, torch.fx.Node)
    while is_attached(base) and isinstance(base.args[0], torch.fx.Node):
        base = base.args[0]
    return base


def _has_narrow_statistics(node: torch.fx.Node) -> bool:
    """Whether it normalizes, or is such an operator's backward pass, in 16 bits by weights in 32: on CPUs its mean and
    deviation have 32 bits, where fake values and compiled code have 16."""
    if not _name(node).removeprefix("_").startswith(("native_layer_norm", "native_group_norm", "native_batch_norm")):
        return False
    values = [n.meta.get("val") for n in node.all_input_nodes]
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
    return len(dtypes) > 1 and not _NARROW.isdisjoint(dtypes)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(v is None or _is_plain(v) for v in value)
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_complex()
        and not value.is_quantized
        and all(isinstance(s, int) for s in value.shape)
    )


def _is_random(node: torch.fx.Node) -> bool:
    if node.target in (dropout_noise, shaped_noise):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [a.name for a in node.target._schema.arguments]
    if "dropout_p" in names:  # attention
        place = names.index("dropout_p")
        if (node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)) == 0.0:
            return False
    return torch.Tag.nondeterministic_seeded in node.target.tags


def is_attached(node: torch.fx.Node) -> bool:
    """Whether a node goes where its first input is computed: an element of its results, or a view."""
    return node.target is operator.getitem or is_true_view(node)


def is_true_view(node: torch.fx.Node) -> bool:
    """Whether an operator only looks at its input's memory, as the strides of fake values have it."""
    if not is_view(node) or not isinstance(node.args[0], torch.fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if node.target in (aten.reshape.default, aten._unsafe_view.default, aten.view.default):
        try:
            before.view(after.shape)  # type: ignore[union-attr]
        except (RuntimeError, AttributeError):
            return False
        return True
    if node.target is aten.contiguous.default:
        return isinstance(before, torch.Tensor) and before.is_contiguous()
    return True


def _name(node: torch.fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_cheap(node: torch.fx.Node) -> bool:
    """Whether an operator is elementwise, so that forming its value again costs little more than reading it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in _CREATE | _COPIES


def is_fusible(node: torch.fx.Node) -> bool:
    name = _name(node)
    return name not in _CALLS and "attention" not in name


def _direct_readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Nodes that read a value, through views, too; the views are not among them."""
    found: list[torch.fx.Node] = []
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user not in seen:
                seen.add(user)
                if is_true_view(user) or (user.target is operator.getitem and is_view(user)):
                    stack.append(user)
                else:
                    found.append(user)
    return found


def _is_of_batch(node: torch.fx.Node) -> bool:
    return type(node.meta.get("desc")).__name__ == "PlainAOTInput"


def _bytes(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), str(value.dtype), str(value.device))
    return tuple(map(described, value)) if isinstance(value, (tuple, list)) else None


def _signature(node: torch.fx.Node) -> Any:
    """Equal for operators that do the same to values that are alike."""
    constants = str(torch.fx.node.map_arg((node.args, node.kwargs), lambda n: str(described(n.meta.get("val")))))
    return (str(node.target), constants, described(node.meta.get("val")))


def _broken(work: Sequence[torch.fx.Node]) -> list[int]:
    """By position: bytes that a cut there has written and read again, which one loop would have kept in registers."""
    place = {n: i for i, n in enumerate(work)}
    level: dict[torch.fx.Node, int] = {}
    for node in work:
        sources = [source(a) for a in node.all_input_nodes]
        below = max((level[a] for a in sources if a in level), default=0)
        calls = not is_fusible(node) or any(not is_fusible(a) for a in sources if a in level)
        level[node] = below + calls
    change = [0] * (len(work) + 1)
    for node in work:
        if not is_fusible(node):
            continue
        readers = (r for r in _direct_readers(node) if level.get(r) == level[node] and is_fusible(r))
        last = max((place[r] for r in readers), default=0)
        if last > place[node]:
            change[place[node] + 1] += _bytes(node) or 1
            change[last + 1] -= _bytes(node) or 1
    found, total = [], 0
    for step in change:
        total += step
        found.append(total)
    return found


def source(node: torch.fx.Node) -> torch.fx.Node:
    while is_attached(node) and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node
