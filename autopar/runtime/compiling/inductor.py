"""The one place where a graph of tensor operators is handed to PyTorch's compiler, inductor."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx

from autopar.errors import CompileError

Compiled = Callable[[list[Any]], Sequence[Any]]
"""Takes a region's inputs as a list, which it empties, so that each is freed after its last use; returns outputs."""


def check_compiler(device: torch.device) -> None:
    """Raises `CompileError` where this machine lacks what inductor needs for `device`: a C++ compiler, or Triton."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise CompileError(
                "compile=True needs Triton to compile for a GPU, and it cannot be imported: install the package "
                "'triton' of your PyTorch build, or leave compile=True out"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as e:
        raise CompileError(
            "compile=True needs a C++ compiler, and none was found: install g++ or clang++ (on Debian and Ubuntu: "
            "apt-get install g++), or name one in the environment variable CXX; or leave compile=True out"
        ) from e


@cache
def probe_best_instructions() -> None:
    """Has inductor try whether it can compile for the best of an x86 processor's vector instructions alone, rather than
    for all, of which it then takes the best: of six starts of the C++ compiler, three are left. Does nothing where
    inductor has tried them already, or is told which to take."""
    from torch._inductor import config, cpu_vec_isa

    is_told = config.cpp.simdlen is not None or config.cpp.vec_isa_ok is not None or "ATEN_CPU_CAPABILITY" in os.environ
    if platform.machine() != "x86_64" or is_told or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return
    every, flags = cpu_vec_isa.supported_vec_isa_list, cpu_vec_isa.x86_isa_checker()
    best = [isa for isa in every if all(f in flags for f in str(isa).split())]
    cpu_vec_isa.supported_vec_isa_list = [next((isa for isa in best if isa), cpu_vec_isa.invalid_vec_isa)]
    try:
        cpu_vec_isa.valid_vec_isa_list()
    finally:
        cpu_vec_isa.supported_vec_isa_list = every


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    """Compiles a graph without side effects, which returns a tuple of tensors.

    `inputs`: fake tensors, one for each placeholder. Outputs keep the strides that the graph's fake values have. Within
    `one_file()` the function can be called once that has closed. Raises what inductor raises where it fails.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = detect_fake_mode(inputs) or detect_fake_mode([n.meta.get("val") for n in module.graph.nodes])
    assert mode is not None, "a captured graph has fake values"
    if all(t.device.type == "cpu" for t in inputs):
        probe_best_instructions()
    with _settled(mode):
        decomposed = make_fx(module, decomposition_table=select_decomp_table())(*inputs)
        joint_graph_passes(decomposed)
        _keep_layouts_of_convolutions(decomposed.graph)
        output = decomposed.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        compiled: Compiled = compile_fx_inner(decomposed, list(inputs), is_inference=True)
    return compiled


def _keep_layouts_of_convolutions(graph: torch.fx.Graph) -> None:
    """Has inductor call gradients of convolutions with inputs in the captured layouts.

    Without this flag inductor copies the inputs to the layout of the weight's gradient. For a depthwise convolution on
    channels-last images that layout is neither channels-last nor contiguous, and the call took 2.8 times as long
    (8 images of 32 channels and 16 x 16, one core, PyTorch 2.13).
    """
    for node in graph.nodes:
        if node.target is torch.ops.aten.convolution_backward.default:
            node.meta["should_fallback"] = True


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """Raises `CompileError` in the place of what inductor, or the compiler that it starts, raises within it."""
    try:
        yield
    except Exception as e:
        first = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise CompileError(
            f"inductor, PyTorch's compiler, failed on a part of the step: {type(e).__name__}: {first}. Leave "
            "compile=True out; TORCH_LOGS=+inductor shows more"
        ) from e


def output_strides(compiled: Compiled) -> dict[int, tuple[int, ...]]:
    """The strides that inductor has chosen for outputs, by place; those that it does not tell are absent."""
    known = getattr(compiled, "output_strides", None) or []
    return {i: tuple(int(s) for s in strides) for i, strides in enumerate(known) if strides is not None}


@contextlib.contextmanager
def _settled(mode: Any) -> Iterator[None]:
    """What holds while inductor runs: autocast's conversions are in the graph already, and convolutions keep the layout
    of the captured step, which is the one between regions, too."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(mode)
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        stack.enter_context(config.patch(layout_optimization=False))
        yield
