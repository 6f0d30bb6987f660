"""How long each node of a training graph takes on the device at hand.

Nodes are timed one by one, and then scaled so that they sum up to what the graph takes when it runs as a whole: what
lies between two nodes, as freeing memory, is shared out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.fx
from torch import nn

from autopar.ir.batch import Batch
from autopar.ir.build import named_parameters
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.clock import Clock
from autopar.runtime.compiling.compute import CompiledRegion, Compiler
from autopar.runtime.model.eager import owners_of
from autopar.runtime.operator_times import OperatorTimes, operator_key
from autopar.runtime.replay import as_captured

REPEATS, REPEATS_AT_ONCE = 3, 8
"""Behind one that warms up; and on several ranks at once, which may share cores, and then vary more."""


def known_seconds(graph: TrainingGraph, device: torch.device, ranks: int = 1) -> dict[str, float] | None:
    """Seconds of each of `graph.compute`, by name, where all its operators were measured before, on as many ranks at
    once; else `None`."""
    known = OperatorTimes.of(device, ranks).seconds
    keys, constants = _keys(graph)
    if any(key not in known for key in keys.values()):
        return None
    return {name: known[key] for name, key in keys.items()} | constants


def node_seconds(
    graph: TrainingGraph,
    model: nn.Module,
    batch: Batch,
    loss_fn: Any = None,
    compiler: Compiler | None = None,
    *,
    ranks: int = 1,
    meet: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Seconds of each of `graph.compute`, by name: medians. Runs the forward and backward pass a few times on `batch`;
    changes neither parameters nor buffers, nor the state of random numbers. The model lies on the device that is meant.
    `ranks`: how many do so at once; `meet` waits for them, before each pass.

    With a `compiler`, the pass is compiled, too, and a region's time is shared out among its operators as they take
    when they run one by one.
    """
    joint = graph.joint
    assert joint is not None, "a graph that was captured in this process"
    owners = owners_of(model, loss_fn).items()
    buffers = {start + n: b for start, owner in owners for n, b in owner.named_buffers(remove_duplicate=False)}
    parameters = named_parameters(model, loss_fn)
    device = next(iter(parameters.values())).device
    arguments: list[torch.Tensor] = []
    for (kind, key), node in zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=True):
        if kind == "batch":
            arguments.append(batch.tensors[int(key)].to(device))
        elif kind == "tangent":
            like = node.meta["val"]
            arguments.append(torch.ones(tuple(like.shape), dtype=like.dtype, device=device))
        else:
            arguments.append((parameters if kind == "parameter" else buffers)[str(key)].detach().clone())
    clock, repeats = Clock(device), REPEATS if ranks == 1 else REPEATS_AT_ONCE
    found = _seconds(joint.module, arguments, clock, repeats, meet)
    scaled = {n.name: found.get(n.name, 0.0) for n in graph.compute}
    keys, constants = _keys(graph)
    alike: dict[str, list[float]] = {}
    for name, key in keys.items():
        alike.setdefault(key, []).append(scaled[name])
    OperatorTimes.of(device, ranks).add(alike)
    if compiler is not None:
        module = compiler.compiled(torch.fx.GraphModule(joint.module, copy.deepcopy(joint.module.graph)))
        scaled = _shared_out(module, _seconds(module, arguments, clock, repeats, meet), scaled)
    return scaled | constants


def _keys(graph: TrainingGraph) -> tuple[dict[str, str], dict[str, float]]:
    """The key of each operator of `graph.compute`, by name; and no seconds of what is there already."""
    assert graph.joint is not None, "a graph that was captured in this process"
    calls = {node.name: node for node in graph.joint.module.graph.nodes if node.op == "call_function"}
    keys = {n.name: operator_key(calls[n.name]) for n in graph.compute if n.name in calls}
    return keys, {n.name: 0.0 for n in graph.compute if n.name not in calls}


def _seconds(
    module: torch.fx.GraphModule,
    arguments: Sequence[torch.Tensor],
    clock: Clock,
    repeats: int,
    meet: Callable[[], None],
) -> dict[str, float]:
    """Of each call in a graph, by its node's name; as much together as the graph takes as a whole."""
    rows = []
    with as_captured(), torch.random.fork_rng([clock.device] if clock.device.type == "cuda" else []):
        for _ in range(1 + repeats):
            nodes = _Nodes(module, clock)
            meet()
            nodes.run(*arguments)
            rows.append(nodes.seconds)
        whole = []
        for _ in range(1 + repeats):
            meet()
            whole.append(clock.of(lambda: module(*arguments)))
    found = {name: median(row.get(name, 0.0) for row in rows[1:]) for name in rows[0]}
    scale = median(whole[1:]) / max(sum(found.values()), 1e-9)
    return {name: seconds * scale for name, seconds in found.items()}


def _shared_out(
    module: torch.fx.GraphModule, compiled: Mapping[str, float], alone: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of each operator of a compiled graph. `compiled`: of its calls. `alone`: of each operator by itself."""
    found = {name: compiled.get(name, 0.0) for name in alone}
    for node in module.graph.find_nodes(op="call_module"):
        region = module.get_submodule(str(node.target))
        if isinstance(region, CompiledRegion):
            mine = [name for name in region.names if name in alone]
            whole_s = max(sum(alone[name] for name in mine), 1e-12)
            found |= {name: compiled[node.name] * alone[name] / whole_s for name in mine}
    # What passes values to regions and takes their results has its share of the time, and is no operator.
    scale = sum(compiled.values()) / max(sum(found.values()), 1e-12)
    return {name: seconds * scale for name, seconds in found.items()}


class _Nodes(torch.fx.Interpreter):
    """Runs a graph, and keeps how long each call took."""

    def __init__(self, module: torch.fx.GraphModule, clock: Clock) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._name = ""

    def run_node(self, n: torch.fx.Node) -> Any:
        self._name = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._timed(super().call_function, target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._timed(super().call_module, target, args, kwargs)

    def _timed(self, call: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        start = self._clock.now()
        value = call(target, args, kwargs)
        self.seconds[self._name] = self._clock.now() - start
        return value
