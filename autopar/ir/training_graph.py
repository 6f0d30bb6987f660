"""The training graph: one training step's forward and backward pass, with a table of its parameters.

Made by `autopar.ir.capture`; read by strategies, cost models and the search; rewritten by the runtime.
Everything but `joint` is plain data, so planning does not touch torch again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from autopar.ir.branches import Branch
from autopar.ir.dtypes import DTYPE_BYTES
from autopar.spec.plan import ModelFingerprint, ParameterSpec, Recompute

if TYPE_CHECKING:
    from autopar.ir.capture import JointGraph

GradientStructure = Literal["dense", "rows", "factors"]


@dataclass(frozen=True, slots=True)
class Term:
    """One of the summands of a structured gradient, by names of nodes."""

    node: str
    """Whose value the summand is; not computed where its parts are sent instead."""
    position: int
    """Of that node: here both parts are complete, and not yet overwritten."""
    left: str
    """`rows`: the indices. `factors`: a matrix of one row a sample, as wide as the gradient is high."""
    right: str
    """`rows`: the gradients of what was looked up. `factors`: a matrix of as many rows, as wide as the gradient."""
    left_transposed: bool = False
    right_transposed: bool = False
    padding: int = -1
    """`rows`: the index that gets no gradient; -1 for none."""
    offsets: str | None = None
    """`rows`: where the bags of an embedding bag begin in the indices; `right` then has one row a bag."""
    mean: bool = False
    """`rows`: whether a bag is the mean of its rows, rather than their sum."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a structured gradient is made of: the sum of its terms."""

    kind: Literal["rows", "factors"]
    terms: tuple[Term, ...]
    rows: int
    """Rows of the parts, over all terms, in the batch that was captured."""
    distinct: int
    """`rows`: different ones among them. `factors`: as many as `rows`."""
    left_width: int
    """Elements of a row of the left part; 0 for indices."""
    right_width: int
    known: int
    """Position behind which the number of rows is known, that of the last node of the indices; -1: from the start."""
    replaced: tuple[str, ...]
    """Nodes that need not be computed where the parts are sent."""

    @property
    def row_width(self) -> int:
        """Elements of one row of both parts, indices not counted."""
        return self.left_width + self.right_width


@dataclass(frozen=True, slots=True)
class Lookup:
    """A node that looks rows of a table up; nodes by their names."""

    node: str
    indices: str
    known: int
    """Position behind which the indices are known; -1: from the start."""
    position: int
    """Of the node."""
    rows: int
    """That are looked up in the batch that was captured."""
    distinct: int
    """Different ones among them."""


@dataclass(frozen=True, slots=True)
class Table:
    """How a parameter is read of which rows are looked up, by nothing else or by a head besides."""

    lookups: tuple[Lookup, ...]
    parts: Parts
    """What its gradient is made of, less the head's part."""


@dataclass(frozen=True, slots=True)
class Head:
    """A linear layer over classes, and the cross-entropy of its scores; nodes by their names."""

    weight: str
    """The parameter, [classes, width]."""
    bias: str | None
    hidden: str
    """What the layer is given: [samples, width]."""
    target: str
    """The classes of the samples."""
    loss: str
    """A scalar, the sum or mean over the samples."""
    seed: str
    """Gradient of that scalar."""
    hidden_gradient: str | None
    weight_gradient: str
    log_sum: str | None
    """The sums of a sample's log-probabilities over all classes, where label smoothing reads them."""
    log_sum_gradient: str | None
    samples: int
    width: int
    classes: int
    ignored: int
    """The target of samples that do not count."""
    mean: bool
    """Over the samples that count; otherwise the sum."""
    dtype: str
    """In which the softmax is computed."""
    begin: int
    """Position behind which both `hidden` and `target` are there."""
    turn: int
    """Position behind which the gradient of the scores can be computed."""
    replaced: tuple[str, ...]
    """Nodes that need not be computed where ranks share the classes out."""

    @property
    def numbers(self) -> int:
        """What ranks exchange of each sample's scores: the largest, a sum of exponentials, the target's; and their
        sum, where label smoothing reads it."""
        return 3 if self.log_sum is None else 4


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, by the nodes that take part; a bias is added to the product."""

    given: str
    """[samples, width]."""
    product: str
    """[samples, outputs]: of what is given and the weight, [outputs, width]."""
    bias: str | None
    """What the product's node adds."""
    error: str
    """The product's gradient."""
    given_gradient: str | None
    samples: int
    width: int
    outputs: int
    product_position: int
    turn: int
    """Position behind which the error is there, and nobody has needed it yet."""
    replaced: tuple[str, ...]
    """Nodes that need not be computed where ranks share the outputs out."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable parameter, seen from the graph. Positions are indices into `TrainingGraph.compute`."""

    spec: ParameterSpec
    gradient: str
    """Name of the node whose value is the gradient, complete over all uses of the parameter."""
    ready: int
    """Position of that node."""
    first_use: int
    """Position of the first node that reads the parameter in the forward pass."""
    last_use: int
    """Position of the last node that reads it, or a view of it; it may be overwritten after that."""
    structure: GradientStructure = "dense"
    """`rows`: rows of an embedding table; `factors`: a product of two thin matrices; as found in the graph."""
    parts: Parts | None = None
    """What a structured gradient is made of; `None` for a dense one."""
    head: Head | None = None
    """The head whose weight or bias it is, where it is nothing else, or a table besides."""
    table: Table | None = None
    """Where rows of it are looked up, and nothing else reads it but its head."""
    layer: Layer | None = None
    """The linear layer whose weight it is, where it is nothing else."""
    last_forward: int = -1
    """Position of the last node of the forward pass that reads it, or a view of it; -1 where that is not known."""
    first_backward: int = -1
    """Position of the first node of the backward pass that reads it, or a view of it; -1 for none."""
    branch: Branch | None = None
    """The part of the model that it is in, where steps may leave that out, and can tell beforehand."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def sizes(self) -> Hashable:
        """Of what its gradient is made of, and of the layers that it belongs to."""
        parts, head, layer, table = self.parts, self.head, self.layer, self.table
        return (
            parts and (parts.kind, parts.rows, parts.distinct, parts.left_width, parts.right_width),
            head and (head.samples, head.width, head.classes),
            layer and (layer.samples, layer.width, layer.outputs),
            table and tuple((lookup.rows, lookup.distinct) for lookup in table.lookups),
        )


@dataclass(frozen=True, slots=True)
class ComputeNode:
    """One node of the joint graph, with what it costs."""

    name: str
    op: str
    """The aten operator, as `mm.default`."""
    flops: int
    bytes_moved: int
    """Read and written; 0 for views."""
    live_bytes: int
    """Bytes of values alive while the node runs, parameters, buffers and inputs not counted."""
    own_bytes: int = 0
    """Of these, what the node itself allocates."""
    needed_until: int = -1
    """Position of the last node that needs what it allocates; -1 where that is not known."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a pass has done to a graph, in nodes."""

    name: str
    what: str
    added: int
    removed: int
    changed: int
    """That call something else, or read something else."""
    moved: int
    """That have another place in the order."""


@dataclass(frozen=True)
class TrainingGraph:
    """The joint forward and backward graph of a model's training step on one rank's batch."""

    model: ModelFingerprint
    parameters: tuple[Parameter, ...]
    """The trainable ones, in the order of `named_parameters`."""
    compute: tuple[ComputeNode, ...]
    """The graph's nodes in execution order, placeholders and output left out."""
    backward_start: int
    """Position of the first node of the backward pass."""
    batch_size: int | None
    """Samples in the batch that was captured (`Batch.size`)."""
    buffer_bytes: int
    input_bytes: int
    autocast: str | None = None
    """The number format of `torch.autocast`, where the step was captured under it: matrix products compute in it."""
    recompute: Recompute = "none"
    """What of the forward pass is computed again in the backward pass."""
    eager: bool = False
    """Whether it is the outline of a model that runs eagerly (`autopar.ir.outline`)."""
    passes: tuple[Done, ...] = field(default=(), compare=False, repr=False)
    """What each pass has done to the graph."""
    joint: JointGraph | None = field(default=None, compare=False, repr=False)
    """The graph itself; absent where only a plan is to be priced."""

    @cached_property
    def by_name(self) -> Mapping[str, Parameter]:
        return {p.name: p for p in self.parameters}

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel * DTYPE_BYTES[p.spec.dtype] for p in self.parameters)
