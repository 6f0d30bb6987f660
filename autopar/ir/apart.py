"""A drop-in module's outputs and gradients, each in memory of its own, so that each has a gradient or a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx
from torch import nn

from autopar.ir.aliases import base

aten = torch.ops.aten


@dataclass(frozen=True)
class Apart:
    """Outputs of a drop-in module, by number, in whose memory something else lies as the model returns them."""

    copied: frozenset[int] = frozenset()
    """Those that the model is to copy."""
    shared: frozenset[int] = frozenset()
    """All of them: who writes to one of them changes something else, unless it is a copy."""

    def __or__(self, other: Apart) -> Apart:
        return Apart(self.copied | other.copied, self.shared | other.shared)


def outputs_apart(module: torch.fx.GraphModule, step: nn.Module, batch: Sequence[torch.Tensor]) -> Apart:
    """What of the outputs of a traced `step` is to be copied: a parameter or a tensor of the batch that requires a
    gradient, or a view of one, and what lies in another output's memory.

    AOTAutograd leaves such outputs to be made again, by views outside of its graph, which has no gradients for them;
    for a copy it has. TorchDynamo leaves the attribute of a parameter (`weight.T`) to be read outside of its graph, and
    in the graph there is a tensor without memory. [Empirical, torch 2.13]
    """
    from torch._functorch._aot_autograd import descriptors as d

    parameters = dict(step.named_parameters(remove_duplicate=False))
    output = module.graph.output_node()
    described = list(zip(output.args[0], output.meta["desc"], strict=True))  # type: ignore[arg-type]
    inputs = [n.meta["desc"] for n in module.graph.find_nodes(op="placeholder")]
    tangents = {x.output for x in inputs if isinstance(x, d.TangentAOTInput)}
    own = {x.idx for x in tangents if isinstance(x, d.PlainAOTOutput)}
    of_base = {getattr(x.base_of, "idx", -1) for x in tangents if isinstance(x, d.IntermediateBaseAOTOutput)}
    copied: set[int] = set()
    shared: set[int] = set()
    by_memory: dict[torch.fx.Node, dict[int, torch.fx.Node]] = {}
    for node, x in described:
        if not isinstance(x, d.PlainAOTOutput) or not _may_have_gradient(node):
            continue
        memory = base(node)
        if memory.op == "placeholder":
            of = memory.meta["desc"]
            trained = isinstance(of, d.ParamAOTInput) and parameters[of.target].requires_grad
            if trained or (isinstance(of, d.PlainAOTInput) and batch[of.idx].requires_grad):
                copied.add(x.idx)
        elif memory.op == "get_attr":
            copied.add(x.idx)
        else:
            by_memory.setdefault(memory, {})[x.idx] = node
    for outputs in by_memory.values():
        if len(outputs) > 1 and not outputs.keys().isdisjoint(own | of_base):
            copied |= outputs.keys() - own
            if len(set(outputs.values())) > 1:
                shared |= outputs.keys()
    return Apart(frozenset(copied), frozenset(copied | shared))


def copy_tangents(module: torch.fx.GraphModule) -> None:
    """Has gradients of parameters that are an output's gradient itself, as that of a parameter which the model returns,
    be computed like others: by a copy, where the backward pass begins."""
    from torch._functorch._aot_autograd import descriptors as d

    output = module.graph.output_node()
    results: list[torch.fx.Node | None] = list(output.args[0])  # type: ignore[arg-type]
    described = [x.grad_of if isinstance(x, d.GradAOTOutput) else None for x in output.meta["desc"]]
    places = [
        i
        for i, (node, of) in enumerate(zip(results, described, strict=True))
        if node is not None and node.op == "placeholder" and isinstance(of, d.ParamAOTInput)
    ]
    if not places:
        return
    tangents = {n for n in module.graph.find_nodes(op="placeholder") if isinstance(n.meta["desc"], d.TangentAOTInput)}
    begin = next(n for n in module.graph.nodes if not tangents.isdisjoint(n.all_input_nodes))
    copies: dict[torch.fx.Node | None, torch.fx.Node] = {}
    for i in places:
        node = results[i]
        if node not in copies:
            with module.graph.inserting_before(begin):
                copies[node] = module.graph.call_function(aten.clone.default, (node,))
            copies[node].meta.update(val=node.meta["val"])  # type: ignore[union-attr]
        results[i] = copies[node]
    output.args = (tuple(results),)


def _may_have_gradient(node: object) -> bool:
    """Whether a value is of a kind that gradients are taken of."""
    if not isinstance(node, torch.fx.Node):
        return False
    dtype = node.meta["val"].dtype if "val" in node.meta else torch.float32
    return bool(dtype.is_floating_point or dtype.is_complex)
