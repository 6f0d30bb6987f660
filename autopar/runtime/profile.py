"""How long each node of a training graph takes on the device at hand.

Nodes are timed one by one, and then scaled so that they sum up to what the graph takes when it runs as a whole: what
lies between two nodes, as freeing memory, is shared out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.fx
from torch import nn

from autopar.ir.batch import Batch
from autopar.ir.build import named_parameters
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.operator_times import OperatorTimes, operator_key

REPEATS = 3
"""Behind one that warms up."""


def node_seconds(graph: TrainingGraph, model: nn.Module, batch: Batch, loss_fn: Any = None) -> dict[str, float]:
    """Seconds of each of `graph.compute`, by name: medians. Runs the forward and backward pass a few times on `batch`,
    unless all operators were measured before; changes neither parameters nor buffers. The model lies on the device that
    is meant."""
    joint = graph.joint
    assert joint is not None, "a graph that was captured in this process"
    owners = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    buffers = {n: b for owner in owners for n, b in owner.named_buffers()}
    parameters = named_parameters(model, loss_fn)
    device = next(iter(parameters.values())).device
    known = OperatorTimes.of(device)
    key_of = {node.name: operator_key(node) for node in joint.module.graph.nodes if node.op == "call_function"}
    keys = {n.name: key_of[n.name] for n in graph.compute if n.name in key_of}
    constants = {n.name: 0.0 for n in graph.compute if n.name not in key_of}  # are there already
    if all(key in known.seconds for key in keys.values()):
        return {name: known.seconds[key] for name, key in keys.items()} | constants
    arguments: list[torch.Tensor] = []
    for (kind, key), node in zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=True):
        if kind == "batch":
            arguments.append(batch.tensors[int(key)].to(device))
        elif kind == "tangent":
            like = node.meta["val"]
            arguments.append(torch.ones(tuple(like.shape), dtype=like.dtype, device=device))
        else:
            arguments.append((parameters if kind == "parameter" else buffers)[str(key)].detach().clone())
    clock = _Clock(device)
    rows = []
    with torch.no_grad():
        for _ in range(1 + REPEATS):
            nodes = _Nodes(joint.module, clock)
            nodes.run(*arguments)
            rows.append(nodes.seconds)
        whole_s = median(clock.of(lambda: joint.module(*arguments)) for _ in range(1 + REPEATS))
    found = {n.name: median(row.get(n.name, 0.0) for row in rows[1:]) for n in graph.compute}
    scale = whole_s / max(sum(found.values()), 1e-9)
    scaled = {name: seconds * scale for name, seconds in found.items()} | constants
    alike: dict[str, list[float]] = {}
    for name, key in keys.items():
        alike.setdefault(key, []).append(scaled[name])
    known.add(alike)
    return scaled


class _Clock:
    """Wall time until a device is done."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"

    def now(self) -> float:
        if self._asynchronous:
            torch.cuda.synchronize()
        return time.perf_counter()

    def of(self, work: Callable[[], object]) -> float:
        start = self.now()
        work()
        return self.now() - start


class _Nodes(torch.fx.Interpreter):
    """Runs a graph, and keeps how long each call took."""

    def __init__(self, module: torch.fx.GraphModule, clock: _Clock) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._name = ""

    def run_node(self, n: torch.fx.Node) -> Any:
        self._name = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        start = self._clock.now()
        value = super().call_function(target, args, kwargs)
        self.seconds[self._name] = self._clock.now() - start
        return value
