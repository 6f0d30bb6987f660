"""Compiled compute: a step's graph whose operators between communication are calls of compiled functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from autopar.runtime.compiling.inductor import Compiled, compile_errors, compile_graph, output_strides
from autopar.runtime.compiling.kernels import one_file
from autopar.runtime.compiling.passes import fold_cats_of_one, functional, noise_of_shapes
from autopar.runtime.compiling.products import is_onednn_faster, products_by_onednn
from autopar.runtime.compiling.regions import (
    Partition,
    Region,
    described,
    is_attached,
    is_fusible,
    source,
)
from autopar.runtime.proofs.region_proof import RegionProof


@dataclass(eq=False)
class Compiler:
    """Compiles the graphs of a program. Regions that are equal but for names are compiled once, whatever graph of the
    program they are in."""

    compile: Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Compiled] = compile_graph
    known: dict[Hashable, tuple[Compiled, list[tuple[int, ...]], RegionProof | None]] = field(default_factory=dict)
    """Of each region, by what it computes: its function, the strides of what that returns, and its proof."""
    regions: int = 0
    """How many regions the graphs hold."""
    onednn: bool = field(default_factory=is_onednn_faster)
    """Whether oneDNN computes large matrix products."""
    proves: bool = True
    """Whether each function is compared with its operators when it first runs."""

    def compiled(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """The graph, with its plan as it is: collectives, waits and updates in their order."""
        functional(module.graph)
        fold_cats_of_one(module.graph)
        noise_of_shapes(module.graph)
        if self.onednn:
            products_by_onednn(module.graph)
        known = dict(self.known)
        try:
            with one_file():
                return _Rewriter(module, self).write()
        except BaseException:
            self.known = known  # regions added since have no kernels, and cannot be run
            raise

    def of(
        self, part: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> tuple[Compiled, list[tuple[int, ...]], RegionProof | None]:
        """What computes a region, compiled unless an equal one was, the strides of its outputs, and its proof."""
        self.regions += 1
        key = _key(part)
        if key not in self.known:
            with compile_errors():
                run = self.compile(part, inputs)
            planned = output_strides(run)
            fakes = fake_outputs(part, inputs)
            strides = [planned.get(i, tuple(t.stride())) for i, t in enumerate(fakes)]
            self.known[key] = run, strides, RegionProof(part) if self.proves else None
        return self.known[key]


class _Rewriter:
    def __init__(self, module: torch.fx.GraphModule, compiler: Compiler) -> None:
        self._module = module
        self._compiler = compiler
        self._partition = Partition(module)
        self._graph = torch.fx.Graph()
        self._copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self._modules: dict[str, Any] = {}

    def write(self) -> torch.fx.GraphModule:
        for node in self._module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copies[node] = self._graph.node_copy(node)
        for piece in self._partition.pieces:
            if isinstance(piece, Region):
                self._region(piece)
                for node in piece.behind:
                    self._copy(node)
            else:
                self._copy(piece)
        self._copy(self._module.graph.output_node())
        self._graph.lint()
        for node in self._graph.nodes:
            if node.op in ("get_attr", "call_module") and node.target not in self._modules:
                self._modules[str(node.target)] = getattr(self._module, str(node.target))
        return torch.fx.GraphModule(self._modules, self._graph, class_name=type(self._module).__name__)

    def _copy(self, node: torch.fx.Node) -> None:
        for given in node.all_input_nodes:
            self._view(given)
        self._copies[node] = self._graph.node_copy(node, lambda n: self._copies[n])

    def _view(self, node: torch.fx.Node) -> None:
        """Makes a view that stands between regions, where it is not there yet."""
        if node not in self._copies:
            assert self._partition.is_outer_view(node), f"{node} is read before it is computed"
            self._copy(node)

    def _region(self, region: Region) -> None:
        if not region.outputs:
            return
        for node in region.inputs:
            self._view(node)
        if not is_worth_it(region):
            for node in region.body:
                if node not in self._copies:
                    self._copies[node] = self._graph.node_copy(node, lambda n: self._copies[n])
            return
        part, inputs = part_of(region)
        name = f"compute_{region.index}"
        run, strides, proof = self._compiler.of(part, inputs)
        self._modules[name] = CompiledRegion(run, inputs, region, proof)
        listed = self._graph.call_function(list_of, tuple(self._copies[n] for n in region.inputs))
        results = self._graph.call_module(name, (listed,))
        for i, node in enumerate(region.outputs):
            self._copies[node] = self._graph.call_function(operator.getitem, (results, i))
            # What follows is compiled for the layout that the region returns, which need not be the captured one:
            # simplifications may have left an operator an input of another layout.
            node.meta["val"] = _with_strides(node.meta["val"], strides[i])
            self._copies[node].meta = dict(node.meta)


class CompiledRegion(torch.nn.Module):
    """One region of a graph."""

    def __init__(
        self, run: Compiled, inputs: Sequence[torch.Tensor], region: Region, proof: RegionProof | None = None
    ) -> None:
        super().__init__()
        self.names = [n.name for n in region.nodes]
        """Of the operators that it computes."""
        self._run = run
        self._proof = proof
        self._taken = [(t.dtype, tuple(t.stride())) for t in inputs]
        self._bases = [source(n) for n in region.outputs]
        self._own = {i for i, n in enumerate(self._bases) if n not in set(region.inputs)}
        self._shared: list[int] | None = None
        """Outputs that lie in the memory of an input or of another output, though they are values of their own."""

    def forward(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The region's outputs. Empties `inputs`, so that each is freed after its last use."""
        for i, (dtype, stride) in enumerate(self._taken):
            if inputs[i].dtype is not dtype:  # some operators return another than tracing says
                inputs[i] = inputs[i].to(dtype)
            if inputs[i].stride() != stride:
                inputs[i] = laid_out(inputs[i], stride)
        if self._shared is None:
            held = list(inputs)  # else their memory would be taken for outputs
            found = self._run(inputs)
            self._shared = self._in_shared_memory(found, {m: None for t in held if (m := _memory(t))})
            if self._proof is not None:
                self._proof.once(held, found)
            del held
        else:
            found = self._run(inputs)
        if self._shared:
            found = list(found)
            for i in self._shared:
                found[i] = found[i].clone()
        return found

    def _in_shared_memory(self, outputs: Sequence[torch.Tensor], inputs: Mapping[int, None]) -> list[int]:
        """A compiler returns one tensor for two equal values, and an input for a copy of it. But a collective may
        write over what is returned."""
        owner: dict[int, torch.fx.Node | None] = dict(inputs)
        shared = []
        for i, value in enumerate(outputs):
            memory = _memory(value)
            if memory and i in self._own and owner.setdefault(memory, self._bases[i]) is not self._bases[i]:
                shared.append(i)
        return shared


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides: a copy, as of a parameter that was given other memory, where they matter."""
    if all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), stride, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def list_of(*values: torch.Tensor) -> list[torch.Tensor]:
    """What a compiled region takes: a list that it empties, while the graph holds none of the values any more."""
    return list(values)


def is_worth_it(region: Region) -> bool:
    """Whether there are operators to fuse: products alone run no faster compiled."""
    return sum(is_fusible(n) and not is_attached(n) for n in region.body) > 1


def part_of(region: Region) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A region as a graph of its own, with names that say nothing, and fake tensors for its inputs."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: list[torch.Tensor] = []
    for i, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        taken = _without_overlap(node.meta["val"])
        if any(taken is other for other in inputs):  # tracing would take the two inputs for one
            with node.meta["val"].fake_mode:
                taken = torch.empty_strided(taken.shape, taken.stride(), dtype=taken.dtype, device=taken.device)
        copies[node].meta["val"] = taken
        inputs.append(taken)
    for node in region.body:
        copies[node] = graph.create_node(
            "call_function",
            node.target,
            torch.fx.node.map_arg(node.args, lambda n: copies[n]),
            torch.fx.node.map_arg(node.kwargs, lambda n: copies[n]),
        )
        copies[node].meta["val"] = node.meta["val"]
    graph.output(tuple(copies[n] for n in region.outputs))
    return torch.fx.GraphModule({}, graph), inputs


def fake_outputs(part: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What a region returns, as fake tensors, of which the strides are looked at."""
    value = part.graph.output_node().all_input_nodes[0].meta["val"]
    with value.fake_mode, torch.no_grad(), torch._C._DisableAutocast():
        found: Sequence[torch.Tensor] = part(*inputs)
    return found


def _with_strides(value: Any, strides: tuple[int, ...]) -> torch.Tensor:
    if value.stride() == strides:
        return value  # type: ignore[no-any-return]
    with value.fake_mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _without_overlap(value: Any) -> torch.Tensor:
    """A fake tensor as a region takes it: an expanded one as a whole, for the next may not be expanded."""
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        with value.fake_mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return value  # type: ignore[no-any-return]


def _key(part: torch.fx.GraphModule) -> Hashable:
    """Equal for regions that compute the same on values that are alike."""
    place = {n: f"%{i}" for i, n in enumerate(part.graph.nodes)}
    lines = []
    for node in part.graph.nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(place[n]))
        lines.append(f"{node.op} {node.target} {arguments} {described(node.meta.get('val'))}")
    return "\n".join(lines)


class _Name(str):
    def __repr__(self) -> str:
        return str(self)
