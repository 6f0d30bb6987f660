"""Training graphs made of plain data, for tests of cost models and of the search: no torch, no capture."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.training_graph import ComputeNode, GradientStructure, Parameter, TrainingGraph
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import ModelFingerprint, ParameterSpec

Layer = tuple[str, tuple[int, ...]]

MLP: tuple[Layer, ...] = tuple(
    layer for i in range(6) for layer in ((f"{i}.weight", (1024, 1024)), (f"{i}.bias", (1024,)))
)
"""24 MiB of float32 in 12 parameters."""


def training_graph(
    layers: Sequence[Layer] = MLP,
    *,
    flops: int = 10**9,
    bytes_moved: int = 10**6,
    live_bytes: int = 0,
    dtypes: Sequence[str] = (),
    rows: Sequence[str] = (),
) -> TrainingGraph:
    """One forward node and two backward nodes a parameter, all of the same cost; gradients are complete in reverse
    order. `dtypes` are taken in turn; parameters named in `rows` are embedding tables."""
    count = len(layers)
    specs = [
        ParameterSpec(name=name, shape=shape, dtype=dtypes[i % len(dtypes)] if dtypes else "float32")
        for i, (name, shape) in enumerate(layers)
    ]
    nodes = tuple(ComputeNode(f"n{i}", "mm.default", flops, bytes_moved, live_bytes) for i in range(3 * count))
    parameters = []
    for i, spec in enumerate(specs):
        backward = count + 2 * (count - 1 - i)
        structure: GradientStructure = "rows" if spec.name in rows else "dense"
        ready = backward + 1
        parameters.append(
            Parameter(spec, f"n{ready}", ready, i, backward, structure, last_forward=i, first_backward=backward)
        )
    return TrainingGraph(
        model=ModelFingerprint(name="Synthetic", parameters=tuple(specs)),
        parameters=tuple(parameters),
        compute=nodes,
        backward_start=count,
        batch_size=8,
        buffer_bytes=0,
        input_bytes=0,
    )


def cpu_hosts(count: int = 4, bandwidth: str = "1 Gbit/s", devices: str = "1 x cpu") -> ClusterSpec:
    """Equal hosts on one switch."""
    return ClusterSpec.loads(
        f"{{hosts: [{{name: host, count: {count}, devices: {devices}}}], network: {{bandwidth: {bandwidth}}}}}"
    )
