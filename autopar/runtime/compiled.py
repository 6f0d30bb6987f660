"""What a program computes besides what its plan says, and the graphs that it has for one batch signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx

from autopar.ir.batch import Batch
from autopar.ir.build import Unused
from autopar.ir.capture import JointGraph
from autopar.ir.training_graph import TrainingGraph
from autopar.ir.weights import BatchWeight
from autopar.runtime.compute import Compiler
from autopar.strategies.lowering import StepProgram

Weight = Callable[[Any], float] | None
Check = Literal["first", "always", "never"]
"""Which steps are compared with the model run eagerly."""


@dataclass(frozen=True)
class Settings:
    """What a program computes, besides what the plan says."""

    loss_fn: Any = None
    clip_grad_norm: float | None = None
    weight: Weight = None
    """From a batch to how much it counts in the global mean; `None`: read off the loss."""
    unused_parameters: Unused = "error"
    check: Check = "never"
    compiler: Compiler | None = None
    """What compiles the compute between communication; `None` runs operators one by one."""

    def compiled(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """A graph that was written, compiled where that is asked for."""
        return module if self.compiler is None else self.compiler.compiled(module)


@dataclass(eq=False)
class CompiledStep:
    """One batch signature's graphs."""

    graph: TrainingGraph
    program: StepProgram
    weight: BatchWeight
    shared_buffers: tuple[str, ...]
    """Of the buffers, those that the step both reads and writes."""
    step: torch.fx.GraphModule
    finish: torch.fx.GraphModule | None = None
    """The step's last micro-batch, written when first needed."""
    local: torch.fx.GraphModule | None = None
    """Another micro-batch, likewise."""
    proved: bool = False
    """Whether it was compared with the model run eagerly."""

    @property
    def joint(self) -> JointGraph:
        assert self.graph.joint is not None, "only a graph that was captured in this process is compiled"
        return self.graph.joint

    @property
    def loss_dtype(self) -> torch.dtype:
        return self.joint.outputs[0].meta["val"].dtype  # type: ignore[no-any-return]

    def arguments(
        self, batch: Batch, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Of the graphs, less what stands in for the tangent; the batch is moved to where the parameters are."""
        device = next(iter(parameters.values())).device
        found: list[torch.Tensor] = []
        for kind, key in self.joint.inputs:
            if kind == "parameter":
                found.append(parameters[str(key)])
            elif kind == "buffer":
                found.append(buffers[str(key)])
            elif kind == "batch":
                found.append(batch.tensors[int(key)].to(device, non_blocking=True))
        return found

    def tangent(self, seed: float, device: torch.device) -> torch.Tensor:
        """What the backward pass starts from."""
        like = self.joint.outputs[0].meta["val"]  # a fake tensor: its shape and dtype alone
        return torch.full(tuple(like.shape), seed, dtype=like.dtype, device=device)
