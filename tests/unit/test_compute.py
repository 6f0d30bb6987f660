"""Compiled compute: the graph is cut where it must be, equal layers are one, and no number changes.

Most of it is tried with a stand-in for inductor that runs a region's operators one by one: what is under test is which
operators are handed over, and in which order everything runs. `test_inductor` compiles for real.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import CompileError, VerificationError
from autopar.runtime.compiling import inductor
from autopar.runtime.compiling.compute import CompiledRegion, Compiler, laid_out, part_of
from autopar.runtime.compiling.kernels import is_joinable
from autopar.runtime.compiling.passes import fold_cats_of_one, functional
from autopar.runtime.compiling.regions import Partition, Region
from autopar.runtime.proofs.region_proof import RegionProof

Batch = tuple[torch.Tensor, torch.Tensor]


def one_by_one(part: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> inductor.Compiled:
    """In inductor's place: a region's operators as they are, once the list of inputs is emptied."""

    def run(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        taken = list(given)
        given.clear()
        found: Sequence[torch.Tensor] = part(*taken)
        return found

    return run


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.wide(self.norm(x))
        h = 0.5 * h * (1 + torch.tanh(h + 0.04 * h**3))
        return x + F.dropout(self.narrow(h), self.dropout, self.training)


class Net(nn.Module):
    """An embedding tied to the head, equal blocks between, and a buffer that counts."""

    def __init__(self, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def batch(step: int, size: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, 11, (2, size), generator=generator)
    return ids, targets


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.api.Compiler", partial(Compiler, one_by_one))


def optimized(model: nn.Module, **settings: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return autopar.optimize(model, example_inputs=batch(0), loss_fn=F.cross_entropy, optimizer=optimizer, **settings)


def trained(model: nn.Module, **settings: Any) -> list[float]:
    program = optimized(model, **settings)
    torch.manual_seed(1)
    losses = [program.step(batch(i)).item() for i in range(3)]
    return [*losses, program.step(micro_batches=[batch(3), batch(4, 3), batch(5)]).item()]


def apart(a: nn.Module, b: nn.Module) -> float:
    pairs = zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers()), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("dropout", "clip"), [(0.0, None), (0.3, 0.1)])
def test_no_number_changes(dropout: float, clip: float | None) -> None:
    """With dropout, random numbers are drawn in the same order, which the proof of the first step sees, too."""
    plain, compiled = Net(dropout=dropout).double(), Net(dropout=dropout).double()
    expected = trained(plain, clip_grad_norm=clip)
    assert trained(compiled, compile=True, clip_grad_norm=clip) == pytest.approx(expected, rel=1e-12)
    assert apart(plain, compiled) < 1e-12


@pytest.mark.usefixtures("stand_in")
def test_the_drop_in_module() -> None:
    plain, compiled = Net().double(), Net().double()
    module = autopar.optimize(compiled, example_inputs=(batch(0)[0],), compile=True)
    for i in range(2):
        ids, targets = batch(i)
        F.cross_entropy(plain(ids), targets).backward()
        F.cross_entropy(module(ids), targets).backward()
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-12)
    assert apart(plain, compiled) < 1e-12


def counted(blocks: int) -> Compiler:
    compiler = Compiler(one_by_one)
    compiler.compiled(optimized(Net(blocks), check="never").graph_module)
    return compiler


def test_equal_layers_are_compiled_once() -> None:
    few, many = counted(4), counted(6)
    assert many.regions == few.regions + 2 * 2, "each block is a region forward and one backward"
    assert len(many.known) == len(few.known)


def test_a_concatenation_with_nothing_is_read_through_unless_it_may_be_written_over() -> None:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    value, nothing = graph.placeholder("value"), graph.placeholder("nothing")
    for _ in range(2):
        graph.call_function(aten.cat.default, ([nothing, value], -1))
    read, given = graph.find_nodes(op="call_function", target=aten.cat.default)
    for node in (value, nothing, read, given):
        node.meta["val"] = mode.from_tensor(torch.ones(0) if node is nothing else torch.ones(2, 3))
    graph.output((graph.call_function(aten.neg.default, (read,)), graph.call_function(torch.clone, (given,))))
    fold_cats_of_one(graph)
    assert graph.find_nodes(op="call_function", target=aten.cat.default) == [given]
    assert read not in set(graph.nodes) and len(value.users) == 2


def test_what_a_cheap_chain_reads_is_kept_rather_than_each_of_its_values() -> None:
    """Of the activation function's five values, one is what the backward pass needs: it forms the others again."""
    module = optimized(Net(4), check="never").graph_module
    functional(module.graph)
    partition = Partition(module)
    wide = [n for n in module.graph.nodes if getattr(n.meta.get("val"), "shape", None) == (6, 16)]
    crossing = {i for p in partition.pieces if hasattr(p, "inputs") for i in p.inputs if i in wide}
    assert 4 <= len(crossing) <= 2 * 4 < len(wide) / 4


def test_values_are_freed_after_their_last_use() -> None:
    """A region's caller holds none of its inputs, once it runs."""
    held: list[int] = []

    def compile_(part: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> inductor.Compiled:
        run = one_by_one(part, inputs)

        def noticed(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            held.append(min(sys.getrefcount(t) for t in given) - 3)  # the list, `t`, and the call's argument
            return run(given)

        return noticed

    aten = torch.ops.aten
    graph, a, b = torch.fx.Graph(), torch.randn(4, 4), torch.randn(4, 4)
    fake = torch._subclasses.FakeTensorMode().from_tensor(a)
    value, factor = graph.placeholder("a"), graph.placeholder("b")
    for target in (aten.mul.Tensor, aten.add.Tensor, torch.sin) * 3:
        value.meta["val"] = factor.meta["val"] = fake
        value = graph.call_function(target, (value,) if target is torch.sin else (value, factor))
    graph.output(value)
    module = torch.fx.GraphModule({}, graph)
    expected = module(a, b)
    compiled = Compiler(compile_).compiled(module)
    for _ in range(2):  # the first time, inputs are held to see which memory outputs lie in
        assert torch.equal(compiled(a, b), expected)
    assert held[4:] == [0, 0], "of the first region's, the caller holds all: they are the graph's own inputs"


def test_two_outputs_in_one_memory_become_two() -> None:
    """A compiler may return one tensor for two equal values, of which a collective then writes over one."""
    program = optimized(Net(1), check="never")
    regions = [p for p in Partition(program.graph_module).pieces if isinstance(p, Region)]
    region = next(r for r in regions if len(r.outputs) > 1)
    one = torch.ones(3)

    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [one for _ in region.outputs]

    for _ in range(2):
        found = CompiledRegion(run, [], region)([])
        assert len({t.data_ptr() for t in found}) >= 2


def test_inputs_of_another_layout_are_copied_into_the_one_that_was_compiled_for() -> None:
    """A parameter may be given other memory, and what follows the drop-in module may hand an expanded gradient back."""
    tensor = torch.randn(3, 1, 4)
    assert laid_out(tensor, (4, 77, 1)) is tensor, "the stride of one element does not matter"
    for other in (tensor.transpose(0, 2).contiguous().transpose(0, 2), tensor[:, :, :1].expand(3, 1, 4)):
        found = laid_out(other, (4, 4, 1))
        assert found.is_contiguous() and torch.equal(found, other)


def test_inputs_that_are_described_by_one_fake_tensor_are_two() -> None:
    """A drop-in module's backward pass reads a softmax and the dropout noise on it, described by the softmax's."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"] = b.meta["val"] = torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3))
    difference = graph.call_function(aten.sub.Tensor, (a, b))
    found = graph.call_function(aten.tanh.default, (difference,))
    difference.meta["val"] = found.meta["val"] = a.meta["val"]
    graph.output((found,))
    region = next(p for p in Partition(torch.fx.GraphModule({}, graph)).pieces if isinstance(p, Region))
    _, inputs = part_of(region)
    assert inputs[0] is not inputs[1]


@pytest.mark.parametrize("check", ["first", "never"])
def test_what_a_compiler_gets_wrong_later_is_found(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second capture, of which the first step's proof has seen nothing."""
    factor = 1.0

    def wrong(part: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> inductor.Compiled:
        run, by = one_by_one(part, inputs), factor
        return lambda given: [t * by if t.is_floating_point() else t for t in run(given)]

    monkeypatch.setattr("autopar.api.Compiler", partial(Compiler, wrong))
    program = optimized(Net().double(), compile=True, check=check)
    program.step(batch(0))
    factor = 1.0 + 1e-5
    if check == "never":
        program.step(batch(1, 4))
        return
    with pytest.raises(VerificationError, match="PyTorch's compiler has compiled"):
        program.step(batch(1, 4))


def test_a_region_may_differ_as_far_as_rounding_moves_it() -> None:
    """A difference of nearly equal numbers, which is all rounding."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (a, b)),))
    part, inputs = torch.fx.GraphModule({}, graph), [torch.ones(100), torch.ones(100) + 1e-7]
    expected = part(*inputs)[0]
    RegionProof(part).once(inputs, [expected * 2])
    for wrong in (expected + 1e-3, expected * torch.nan):
        with pytest.raises(VerificationError):
            RegionProof(part).once(inputs, [wrong])


def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 11)).double()
    compiled = copy.deepcopy(plain)
    sources: list[str] = []
    load = CppPythonBindingsCodeCache.load_pybinding

    def noted(argtypes: list[str], source: str) -> Any:
        sources.append(source)
        return load(argtypes, source)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", noted)
    expected = [trained_once(plain), trained_once(compiled, compile=True)]
    assert expected[1] == pytest.approx(expected[0], rel=1e-10)
    assert apart(plain, compiled) < 1e-10
    kernels = [source.count("#undef kernel") for source in sources]
    assert len(sources) == 1 and kernels[0] > 1, "a step's kernels are one file"


def test_a_step_whose_kernels_could_not_be_compiled_is_compiled_when_it_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Embedding(13, 8), nn.Tanh(), nn.Linear(8, 13)).double()
    programs = [optimized(copy.deepcopy(plain), **settings) for settings in ({}, {"compile": True})]
    load = CppPythonBindingsCodeCache.load_pybinding
    failures = iter([RuntimeError("killed")])

    def fails_once(argtypes: list[str], source: str) -> Any:
        for error in failures:
            raise error
        return load(argtypes, source)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", fails_once)
    other = tuple(torch.cat([t, t[:1]]) for t in batch(0))  # of another shape
    with pytest.raises(CompileError, match="killed"):
        programs[1].step(other)
    losses = [program.step(other).item() for program in programs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def trained_once(model: nn.Module, **settings: Any) -> list[float]:
    program = optimized(model, **settings)
    torch.manual_seed(1)
    return [program.step(batch(i)).item() for i in range(3)]


def test_a_depthwise_convolutions_gradient_is_computed_in_the_captured_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    rest = [4], (1, 1), (1, 1), (1, 1), False, (0, 0), 4, [True, True, True]

    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.aten.convolution_backward(g * 2, x.sin(), w, *rest))

    g, x = (torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last) for _ in range(2))
    w = torch.randn(4, 1, 3, 3)
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(t) for t in (g, x, w)]
        run = inductor.compile_graph(make_fx(gradients)(*inputs), inputs)
    with Strides() as seen:
        found = run([g, x, w])
    assert seen.taken == [g.stride(), x.stride(), w.stride()]
    for one, other in zip(found, gradients(g, x, w), strict=True):
        torch.testing.assert_close(one, other)


class Strides(TorchDispatchMode):
    """Notes the strides of what gradients of convolutions take."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.taken += [a.stride() for a in args[:3]]
        return func(*args, **(kwargs or {}))


def test_kernels_that_are_not_of_the_known_form_are_compiled_alone() -> None:
    known = '\n#include <x.h>\nextern "C"  void  kernel(const float* in_ptr0,\n double *out)\n{}\n'
    assert is_joinable(["const float*", "double *"], known)
    assert not is_joinable(["const float*", "const int64_t"], known), "a size is no tensor"
    assert not is_joinable(["const float*"], "static int helper() { return 1; }\n" + known)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one kind of vector instructions")
def test_the_best_instructions_that_can_be_compiled_for_are_probed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    asked: list[str] = []

    class Instructions(str):
        def __bool__(self) -> bool:
            asked.append(self)
            return "new" not in self

    every: Any = [Instructions(name) for name in ("absent", "new", "newest new", "good", "old")]
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", every)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["new", "newest", "good", "old"])
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        inductor.probe_best_instructions.__wrapped__()
        assert [*map(str, cpu_vec_isa.valid_vec_isa_list())] == ["good"]
        assert set(asked) == {"new", "newest new", "good"} and cpu_vec_isa.supported_vec_isa_list is every
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


def test_no_compiler() -> None:
    from torch._inductor import config

    without = config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with without, pytest.raises(CompileError, match=r"install g\+\+"):
        optimized(Net(1), compile=True)
