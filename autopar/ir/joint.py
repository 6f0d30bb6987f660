"""The joint forward and backward graph of a training step, as it was captured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from autopar.ir.batch_weight import BatchWeight
from autopar.ir.served import Sizes

if TYPE_CHECKING:  # TorchDynamo, which guards are of, takes 2 s to import, and commands that capture nothing need none
    from autopar.ir.guards import Guards


@dataclass(frozen=True)
class JointGraph:
    """The joint graph, with a name for each of its inputs and outputs.

    Placeholders, in order: `parameters` and `buffers` by name, batch tensors by index, tangents of the outputs.
    Outputs, in order: mutated inputs, the module's outputs, gradients.
    """

    module: torch.fx.GraphModule
    inputs: tuple[tuple[str, str | int], ...]
    """(kind, key) of each placeholder: a `parameter` or `buffer` by name, a `batch` tensor, an output's `tangent` or a
    `size` by index."""
    mutations: tuple[tuple[str, torch.fx.Node], ...]
    """Names of buffers, and the nodes whose values they take."""
    outputs: tuple[torch.fx.Node, ...]
    """The loss in mode `step`, and behind it, where these were asked for, every tensor of the model's output; in mode
    `module`, every tensor of the model's output."""
    gradients: dict[str, torch.fx.Node] = field(default_factory=dict)
    """By parameter name; parameters that get no gradient are absent."""
    weight: BatchWeight | None = None
    """How much the batch counts in the global loss; `None` in mode `module`, where the loss is not seen."""
    input_gradients: dict[int, torch.fx.Node] = field(default_factory=dict)
    """By the index of the batch's tensor, of those that require one."""
    guards: Guards | None = field(default=None, compare=False, repr=False)
    """Whether the graph still is what tracing the model would give; absent where nobody is to ask."""
    sizes: Sizes | None = field(default=None, compare=False, repr=False)
    """Which batches the graph serves, where it serves those of several sizes."""

    copied_inputs: frozenset[int] = frozenset()
    """Tensors of the batch that the model writes to: the graph writes to copies of them."""
    shared_outputs: frozenset[int] = frozenset()
    """Outputs of a drop-in module, by number, that share memory with each other, with a parameter or with the batch as
    the model returns them, and not as the graph does: who writes to one of them would change others in the model."""

    def computed(self) -> list[torch.fx.Node]:
        """The nodes that compute, in order: all but placeholders and the output."""
        return [n for n in self.module.graph.nodes if n.op not in ("placeholder", "output")]

    def placed(self) -> list[tuple[int, torch.fx.Node]]:
        """The nodes that compute, with their positions in `TrainingGraph.compute`."""
        return list(enumerate(self.computed()))

    @property
    def sums_over_ranks(self) -> bool:
        """Whether ranks exchange values within the model, so that none can run it by itself."""
        return any(str(n.target).startswith("autopar.") for n in self.module.graph.nodes)

    @property
    def gathers(self) -> bool:
        """Whether ranks take each other's rows, so that all must know how many each has."""
        return any(str(n.target).startswith("autopar.gather_rows") for n in self.module.graph.nodes)

    @property
    def has_outputs(self) -> bool:
        """Whether it is of a step that returns the model's output besides its loss."""
        return self.weight is not None and len(self.outputs) > 1

    def copied(self) -> JointGraph:
        """A copy of a graph that was traced just now, for passes to rewrite; its nodes have the same names."""
        assert self.sizes is None and self.weight is None, "what was rewritten, or serves several sizes, is not copied"
        graph = torch.fx.Graph()
        of: dict[torch.fx.Node, torch.fx.Node] = {}
        graph.output(graph.graph_copy(self.module.graph, of))
        graph.set_codegen(torch.fx.graph.CodeGen())
        return replace(
            self,
            module=_LazyGraphModule(self.module, graph),  # which is written as code only where somebody calls it
            mutations=tuple((name, of[n]) for name, n in self.mutations),
            outputs=tuple(of[n] for n in self.outputs),
            gradients={name: of[n] for name, n in self.gradients.items()},
            input_gradients={i: of[n] for i, n in self.input_gradients.items()},
        )
