"""What a program computes besides what its plan says, and the graphs that it has for one batch signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.fx
from torch.amp import GradScaler

from autopar.ir.arrivals import Arrivals
from autopar.ir.batch import Batch, shapes_of
from autopar.ir.batch_weight import BatchWeight
from autopar.ir.build import Unused
from autopar.ir.capture import JointGraph
from autopar.ir.passes import EVERY, Passes
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.captures import MOST_CAPTURES
from autopar.runtime.compiling.compute import Compiler
from autopar.runtime.model.padding import Padding
from autopar.runtime.uncaptured.model import EagerModel
from autopar.strategies.lowering import StepProgram
from autopar.strategies.timing import Moments

LossFn = Callable[..., Any]
"""`loss_fn(output, target)`."""
Weight = Callable[[Any], float | Mapping[str, float] | Sequence[float]]
"""From a batch to how much it counts in the global mean; of a loss of several terms, in each of them."""
Capture = Literal["auto", "always", "never"]
"""Whether the model is captured as a graph, or runs eagerly; "auto": eagerly where it cannot be captured."""
Check = Literal["first", "always", "never"]
"""Which steps are compared with the model run eagerly."""


@dataclass(frozen=True)
class Settings:
    """What a program computes, besides what the plan says."""

    loss_fn: LossFn | None = None
    """`None`: the model computes its loss, or a drop-in module, which does not see it."""
    clip_grad_norm: float | None = None
    weight: Weight | None = None
    """`None`: read off the loss."""
    unused_parameters: Unused = "error"
    check: Check = "never"
    passes: Passes = EVERY
    """That rewrite what was captured."""
    capture: Capture = "auto"
    max_captures: int = MOST_CAPTURES
    """Graphs of so many batch signatures are kept; those that were used longest ago go first."""
    padding: Padding | None = None
    """Pads batches; `None` leaves them as they are."""
    compiler: Compiler | None = None
    """What compiles the compute between communication; `None` runs operators one by one."""
    scaler: GradScaler | None = None
    """Keeps the scale of the loss; `None`: it is not scaled."""
    outputs: bool = False
    """Whether every step keeps the model's output; else those that are asked for it."""

    def compiled(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """A graph that was written, compiled where that is asked for."""
        return module if self.compiler is None else self.compiler.compiled(module)


@dataclass(eq=False)
class Compiled:
    """One capture of a model, lowered by a plan, and the graphs that were written from it."""

    graph: TrainingGraph
    program: StepProgram
    """A step in which all groups synchronize; in `others`, one in which some do not."""
    shared_buffers: tuple[str, ...]
    """Of the buffers, those that the forward pass both reads and writes."""
    read_buffers: frozenset[str] = frozenset()
    """Those that it reads, whoever writes them."""
    output: Any = None
    """The model's output with fake tensors, in which the real ones are returned; `None` of a step that returns its loss
    alone."""
    graphs: dict[str, Any] = field(default_factory=dict)
    """By their names in `BaseProgram.writers`: modules, each called as its graph is."""
    others: dict[Moments, Compiled] = field(default_factory=dict)
    """The same capture, lowered for steps in which some groups do not synchronize."""
    eager: EagerModel | None = None
    """The model, where it runs eagerly."""
    batch: Batch | None = None
    """The batch that it is called on then."""
    proved: bool = False
    """Whether it was compared with the model run eagerly."""
    looked: bool = True
    """Whether parts of a batch were looked at since the model has read what it reads here."""

    @property
    def every_graph(self) -> list[torch.fx.GraphModule]:
        """What was captured, and all that was written from it."""
        return [self.joint.module, *(g for c in (self, *self.others.values()) for g in c.graphs.values())]

    @property
    def joint(self) -> JointGraph:
        assert self.graph.joint is not None, "only a graph that was captured in this process is compiled"
        return self.graph.joint

    @cached_property
    def arrivals(self) -> Arrivals:
        """Which gradients of a drop-in module a backward pass comes to."""
        gradients = self.joint.gradients
        names = [next(n for n in (p.name, *p.spec.ties) if n in gradients) for p in self.graph.parameters]
        return Arrivals(self.joint, [gradients[n] for n in names])

    @property
    def weight(self) -> BatchWeight:
        """How much a batch counts in the global loss of a step."""
        assert self.joint.weight is not None, "a drop-in module does not see the loss"
        return self.joint.weight if self.batch is None else self.joint.weight.of_structure(self.batch)

    @property
    def loss_dtype(self) -> torch.dtype:
        return self.joint.outputs[0].meta["val"].dtype  # type: ignore[no-any-return]

    def arguments(
        self,
        tensors: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> list[Any]:
        """The graphs' arguments, less the tangents. `tensors`: the batch's, which are moved to `device`."""
        moved = [t.to(device, non_blocking=True) for t in tensors]
        of: dict[str, Any] = {"parameter": parameters, "buffer": buffers, "batch": moved}
        if self.batch is not None:
            given = [t.to(device, non_blocking=True) for t in self.batch.given] or moved  # in one memory where they are
            of["whole batch"] = [self.batch.rebuild(tuple(given))]
        if self.joint.sizes is not None:
            of["size"] = self.joint.sizes.of(shapes_of(tensors))
        return [of[kind][key] for kind, key in self.joint.inputs if kind != "tangent"]

    def tangent(self, seed: float, device: torch.device) -> torch.Tensor:
        """What the backward pass of a step starts from."""
        like = self.joint.outputs[0].meta["val"]  # a fake tensor: its shape and dtype alone
        # On GPUs, `full` refuses what float16 does not hold, as a loss's first scale: it is to become infinite.
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.full(tuple(like.shape), seed, dtype=dtype, device=device).to(like.dtype)
