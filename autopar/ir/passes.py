"""The passes that lead from what tracing has captured to the graph that is planned for and run, in their order.

A pass takes a joint graph and returns it, rewritten in place. Those that are optional change no value, and can be left
out by name (`Passes.without`); a pass of one's own (`Passes.also`) runs behind those that make the graph smaller, and
before the table of parameters is read off it. All ranks must use the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.fx

from autopar.errors import PlanError, among
from autopar.ir import simplify
from autopar.ir.alignments import keep_alignments
from autopar.ir.capture import JointGraph, Mode
from autopar.ir.empty_batches import keep_nothing_finite
from autopar.ir.hoist import hoist_indices
from autopar.ir.layouts import group_norms_where_they_lie
from autopar.ir.recompute import recompute_activations
from autopar.ir.recurrent import keep_workspaces
from autopar.ir.rematerialize import rematerialize_products
from autopar.ir.reuse import reuse_memory, views_where_they_can_be
from autopar.ir.training_graph import Done
from autopar.ir.weights import batch_weight, of_listed, of_sizes
from autopar.spec.plan import Recompute


@dataclass(frozen=True)
class Capture:
    """What a pass may depend on besides the graph."""

    mode: Mode
    """`step`: the graph runs as a whole; `module`: its two halves run by themselves."""
    batch_size: int | None
    recompute: Recompute = "none"
    listed: bool = False
    """Whether the batch lists its samples."""
    names: tuple[str, ...] = ()
    """Names of the batch's tensors, as messages say them."""


@dataclass(frozen=True)
class Pass:
    """One rewrite of a captured graph, with its name."""

    name: str
    what: str
    """What the pass does, in one line for people."""
    run: Callable[[JointGraph, Capture], JointGraph]
    optional: bool = False
    modes: tuple[Mode, ...] = ("step", "module")
    """The modes of captures in which the pass runs."""


@dataclass(frozen=True)
class Passes:
    """Which optional passes are left out, and which of the user's own run besides."""

    without: tuple[str, ...] = ()
    """Names of optional passes that are left out."""
    also: tuple[Pass, ...] = ()
    """Passes of the user's own that run besides."""

    def __post_init__(self) -> None:
        optional = [p.name for p in (*BEFORE, *BEHIND) if p.optional]
        if (
            isinstance(self.without, str)
            or not isinstance(self.also, tuple)
            or not all(isinstance(p, Pass) for p in self.also)
        ):
            raise PlanError("expected Passes(without=('name', ...), also=(a_pass, ...)): names, and objects of Pass")
        for name in self.without:
            if name not in optional:
                raise PlanError(f"no pass '{name}' can be left out{among(name, optional, 'optional')}")

    @property
    def said(self) -> str:
        """The passes in words, by which ranks compare them."""
        return f"without {sorted(self.without)}, also {[p.name for p in self.also]}"

    def before(self) -> tuple[Pass, ...]:
        """The passes that run before the table of parameters is read off the graph."""
        return (*self._kept(BEFORE), *self.also)

    def behind(self) -> tuple[Pass, ...]:
        """The passes that run after the table of parameters was read off the graph."""
        return self._kept(BEHIND)

    def _kept(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        return tuple(p for p in passes if p.name not in self.without)


def run_passes(passes: Sequence[Pass], joint: JointGraph, capture: Capture) -> tuple[JointGraph, tuple[Done, ...]]:
    """Runs those passes that are part of such a capture, and checks the graph behind each that is the user's own and
    behind all."""
    done = []
    before = _nodes(joint)
    for one in passes:
        if capture.mode not in one.modes:
            continue
        results = _results(joint)
        joint = _following(_ran(one, joint, capture), results)
        after = _nodes(joint)
        same = before.keys() & after.keys()
        changed = sum(before[n] != after[n] for n in same)
        moved = sum(a is not b for a, b in zip(*([n for n in x if n in same] for x in (before, after)), strict=True))
        done.append(Done(one.name, one.what, len(after) - len(same), len(before) - len(same), changed, moved))
        before = after
    joint.module.graph.lint()
    return joint, tuple(done)


def _ran(one: Pass, joint: JointGraph, capture: Capture) -> JointGraph:
    """What a pass returns. Raises `PlanError` with the name of one that is the user's own and fails, or that leaves a
    graph which does not hold together."""
    if one in (*BEFORE, *BEHIND):
        return one.run(joint, capture)
    try:
        found = one.run(joint, capture)
        if not isinstance(found, JointGraph):
            raise TypeError(f"it returned {type(found).__name__}: a pass returns the joint graph that it was given")
        found.module.graph.lint()
    except Exception as e:
        raise PlanError(f"the pass '{one.name}', which is your own, failed: {type(e).__name__}: {e}") from e
    return found


def _results(joint: JointGraph) -> list[torch.fx.Node | None]:
    return list(joint.module.graph.output_node().args[0])  # type: ignore[arg-type]


def _following(joint: JointGraph, before: Sequence[torch.fx.Node | None]) -> JointGraph:
    """The joint graph with the nodes that are its results now, where others were `before`. Raises `PlanError` where
    what was one node is two."""
    now: dict[torch.fx.Node, torch.fx.Node] = {}
    for old, new in zip(before, _results(joint), strict=True):
        if old is not None and new is not None and now.setdefault(old, new) is not new:
            raise PlanError(f"a pass gave one of the results that are node '{old}' another node, and not the others")
    if all(old is new for old, new in now.items()):
        return joint
    return replace(
        joint,
        mutations=tuple((name, now.get(n, n)) for name, n in joint.mutations),
        outputs=tuple(now.get(n, n) for n in joint.outputs),
        gradients={name: now.get(n, n) for name, n in joint.gradients.items()},
        input_gradients={i: now.get(n, n) for i, n in joint.input_gradients.items()},
    )


def _nodes(joint: JointGraph) -> dict[torch.fx.Node, tuple[object, object, object]]:
    return {n: (n.target, n.args, n.kwargs) for n in joint.module.graph.nodes}


def _on_graph(change: Callable[[torch.fx.Graph], None]) -> Callable[[JointGraph, Capture], JointGraph]:
    def run(joint: JointGraph, capture: Capture) -> JointGraph:
        change(joint.module.graph)
        return joint

    return run


def _read_weights(joint: JointGraph, capture: Capture) -> JointGraph:
    samples = capture.batch_size if capture.listed else None
    if joint.sizes is None:
        weight = batch_weight(joint, capture.batch_size, capture.names)
    else:
        weight = of_sizes(joint, samples, capture.names)
    return replace(joint, weight=of_listed(weight, samples))


def _keep_finite(joint: JointGraph, capture: Capture) -> JointGraph:
    keep_nothing_finite(joint, capture.batch_size)
    return joint


def _hoist(joint: JointGraph, capture: Capture) -> JointGraph:
    inputs = zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=True)
    hoist_indices(joint.module.graph, [n for (kind, _), n in inputs if kind in ("batch", "buffer", "size")])
    return joint


def _recompute(joint: JointGraph, capture: Capture) -> JointGraph:
    recompute_activations(joint.module.graph, capture.recompute)
    return joint


BEFORE: tuple[Pass, ...] = (
    Pass("identities", "removes detach and alias", _on_graph(simplify.remove_identities), optional=True),
    Pass("folded views", "folds views of views", _on_graph(simplify.fold_views), optional=True),
    Pass("shared views", "makes one node of equal views", _on_graph(simplify.share_views), optional=True),
    Pass("views folded again", "folds what has become a view of a view", _on_graph(simplify.fold_views), optional=True),
    Pass("dropout", "draws dropout's masks as eager PyTorch does", _on_graph(simplify.eager_dropout)),
    Pass("workspaces", "keeps what recurrent layers save", _on_graph(keep_workspaces)),
    Pass("alignments", "keeps what CTC saves in one size", _on_graph(keep_alignments)),
    Pass("dead code", "removes what nobody reads", _on_graph(simplify.remove_dead_code), optional=True),
    Pass("weights", "reads off the loss how much a batch counts", _read_weights, modes=("step",)),
    Pass("empty batches", "keeps means over nothing finite", _keep_finite, modes=("step",)),
    Pass("indices first", "computes the indices of lookups first", _hoist, optional=True),
    Pass(
        "products again",
        "forms products anew whose factors are kept",
        _on_graph(rematerialize_products),
        optional=True,
        modes=("step",),
    ),
    Pass("recomputation", "computes activations again, as the plan says", _recompute, modes=("step",)),
)
BEHIND: tuple[Pass, ...] = (
    Pass(
        "memory reused",
        "writes over inputs that are read for the last time",
        _on_graph(reuse_memory),
        optional=True,
        modes=("step",),
    ),
    Pass("views that may copy", "lets views copy where memory lies otherwise", _on_graph(views_where_they_can_be)),
    Pass("layouts", "lets group normalization copy where memory lies otherwise", _on_graph(group_norms_where_they_lie)),
)
EVERY = Passes()
