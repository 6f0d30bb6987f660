"""A training graph's tables as JSON: what planning and virtual compute need of a model, without the model.

The joint graph itself is left out, so what is read back can be planned for and priced, but not run.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from autopar.ir.training_graph import (
    ComputeNode,
    GradientStructure,
    Head,
    Layer,
    Parameter,
    Parts,
    Table,
    TrainingGraph,
)
from autopar.spec.plan import ModelFingerprint, Recompute


class GraphTables(BaseModel):
    """A `TrainingGraph` in columns, which take a third of the room of rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelFingerprint
    parameters: tuple[tuple[int, str, int, int, int, GradientStructure], ...]
    """Index in `model.parameters`, then the next fields of `Parameter` in order."""
    reads: tuple[tuple[int, int], ...] = ()
    """`last_forward` and `first_backward` of each parameter."""
    parts: tuple[Parts | None, ...]
    """What each gradient is made of."""
    heads: tuple[Head, ...] = ()
    """Heads that parameters are the weights or biases of."""
    tables: dict[str, Table] = {}
    """By parameter, how rows of it are looked up."""
    layers: dict[str, Layer] = {}
    """By parameter, the linear layer that it is the weight of."""
    names: tuple[str, ...]
    ops: tuple[str, ...]
    """The operators that occur."""
    op: tuple[int, ...]
    """Of each node, as an index in `ops`."""
    flops: tuple[int, ...]
    bytes_moved: tuple[int, ...]
    live_bytes: tuple[int, ...]
    own_bytes: tuple[int, ...] = ()
    needed_until: tuple[int, ...] = ()
    backward_start: int
    batch_size: int | None
    buffer_bytes: int
    input_bytes: int
    recompute: Recompute = "none"

    @classmethod
    def of(cls, graph: TrainingGraph) -> GraphTables:
        """The tables of a graph."""
        index = {p.name: i for i, p in enumerate(graph.model.parameters)}
        ops = tuple(dict.fromkeys(n.op for n in graph.compute))
        number = {op: i for i, op in enumerate(ops)}
        return cls(
            model=graph.model,
            parameters=tuple(
                (index[p.name], p.gradient, p.ready, p.first_use, p.last_use, p.structure) for p in graph.parameters
            ),
            reads=tuple((p.last_forward, p.first_backward) for p in graph.parameters),
            parts=tuple(p.parts for p in graph.parameters),
            heads=tuple(dict.fromkeys(p.head for p in graph.parameters if p.head is not None)),
            tables={p.name: p.table for p in graph.parameters if p.table is not None},
            layers={p.name: p.layer for p in graph.parameters if p.layer is not None},
            names=tuple(n.name for n in graph.compute),
            ops=ops,
            op=tuple(number[n.op] for n in graph.compute),
            flops=tuple(n.flops for n in graph.compute),
            bytes_moved=tuple(n.bytes_moved for n in graph.compute),
            live_bytes=tuple(n.live_bytes for n in graph.compute),
            own_bytes=tuple(n.own_bytes for n in graph.compute),
            needed_until=tuple(n.needed_until for n in graph.compute),
            backward_start=graph.backward_start,
            batch_size=graph.batch_size,
            buffer_bytes=graph.buffer_bytes,
            input_bytes=graph.input_bytes,
            recompute=graph.recompute,
        )

    def graph(self) -> TrainingGraph:
        """The graph again, less its joint graph."""
        head_of = {name: h for h in self.heads for name in (h.weight, h.bias)}
        reads = self.reads or ((-1, -1),) * len(self.parameters)
        columns: tuple[Any, ...] = (self.names, self.op, self.flops, self.bytes_moved, self.live_bytes)
        if self.own_bytes:
            columns = (*columns, self.own_bytes, self.needed_until)
        return TrainingGraph(
            model=self.model,
            parameters=tuple(
                Parameter(
                    spec := self.model.parameters[p[0]],
                    *p[1:],
                    parts=parts,
                    head=head_of.get(spec.name),
                    table=self.tables.get(spec.name),
                    layer=self.layers.get(spec.name),
                    last_forward=last_forward,
                    first_backward=first_backward,
                )
                for p, parts, (last_forward, first_backward) in zip(self.parameters, self.parts, reads, strict=True)
            ),
            compute=tuple(ComputeNode(name, self.ops[op], *costs) for name, op, *costs in zip(*columns, strict=True)),
            backward_start=self.backward_start,
            batch_size=self.batch_size,
            buffer_bytes=self.buffer_bytes,
            input_bytes=self.input_bytes,
            recompute=self.recompute,
        )
