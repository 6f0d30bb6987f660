"""Which operators are left out of compiled regions, as compiled code or its proof would have other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

import autopar.backends.across  # noqa: F401  # registers what ranks do together
from autopar.runtime.compiling.compute import CompiledRegion, part_of
from autopar.runtime.compiling.passes import fold_cats_of_one
from autopar.runtime.compiling.regions import Partition, Region

aten, own = torch.ops.aten, torch.ops.autopar
BFLOAT16 = torch.bfloat16


def is_compiled(target: Any, inputs: list[torch.Tensor], arguments: Callable[..., tuple[Any, ...]]) -> bool:
    """Whether an operator between two others is part of a region, given what `arguments` makes of its inputs."""
    graph, mode = torch.fx.Graph(), torch._subclasses.FakeTensorMode()
    taken = []
    for i, tensor in enumerate(inputs):
        given = graph.placeholder(f"input_{i}")
        given.meta["val"] = mode.from_tensor(tensor)
        taken.append(graph.call_function(aten.tanh.default, (given,)))
        taken[-1].meta["val"] = given.meta["val"]
    node = graph.call_function(target, arguments(*taken))
    with mode:
        node.meta["val"] = target(*torch.fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    several = isinstance(node.meta["val"], tuple)
    read = graph.call_function(torch.ops.aten.alias.default, (node,)) if not several else node
    read.meta["val"] = node.meta["val"]
    graph.output((read,))
    return node in Partition(torch.fx.GraphModule({}, graph)).home


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, True), (BFLOAT16, False)])
def test_norms_of_mixed_dtypes_run_as_they_are(dtype: torch.dtype, expected: bool) -> None:
    x, weight = torch.ones(4, 8, dtype=dtype), torch.ones(8)
    assert expected == is_compiled(aten.native_layer_norm.default, [x, weight], lambda x, w: (x, [8], w, w, 1e-5))
    statistics = torch.ones(4, 1, dtype=dtype)
    backward = aten.native_layer_norm_backward.default
    given = [x, x, statistics, weight]
    assert expected == is_compiled(backward, given, lambda g, x, s, w: (g, x, [8], s, s, w, w, [True] * 3))


def test_norms_of_16_bits_throughout_are_compiled() -> None:
    x, weight = torch.ones(4, 8, dtype=BFLOAT16), torch.ones(8, dtype=BFLOAT16)
    assert is_compiled(aten.native_layer_norm.default, [x, weight], lambda x, w: (x, [8], w, w, 1e-5))


def test_what_ranks_do_together_is_no_compute() -> None:
    assert not is_compiled(own.sum_over_ranks.default, [torch.ones(3)], lambda x: (x, "group"))


@pytest.mark.parametrize(("offset", "expected"), [((), True), ((1,), False)])
def test_places_in_memory_are_read_by_pytorch(offset: tuple[int, ...], expected: bool) -> None:
    found = is_compiled(aten.as_strided.default, [torch.ones(6)], lambda x: (x, [2, 2], [1, 2], *offset))
    assert found is expected


def test_the_memory_that_such_a_place_is_in_is_pytorchs_own() -> None:
    """A compiler may return a tensor that begins elsewhere in its memory."""
    graph, mode = torch.fx.Graph(), torch._subclasses.FakeTensorMode()
    given = graph.placeholder("given")
    made = graph.call_function(aten.tanh.default, (given,))
    view = graph.call_function(aten.slice.Tensor, (made, 0, 2, 6))
    node = graph.call_function(aten.as_strided.default, (view, [2, 2], [1, 2], 1))
    with mode:
        given.meta["val"] = made.meta["val"] = torch.ones(6)
        view.meta["val"] = made.meta["val"][2:6]
        node.meta["val"] = view.meta["val"].as_strided([2, 2], [1, 2], 1)
    graph.output((node,))
    assert made not in Partition(torch.fx.GraphModule({}, graph)).home


def test_a_concatenation_that_lies_otherwise_in_memory_becomes_a_copy() -> None:
    graph, mode = torch.fx.Graph(), torch._subclasses.FakeTensorMode()
    value, nothing = graph.placeholder("value"), graph.placeholder("nothing")
    node = graph.call_function(aten.cat.default, ([nothing, value], 1))
    value.meta["val"] = mode.from_tensor(torch.ones(2, 4, 3).transpose(1, 2))
    nothing.meta["val"] = mode.from_tensor(torch.ones(2, 0, 4))
    node.meta["val"] = mode.from_tensor(torch.ones(2, 3, 4))
    graph.output((graph.call_function(aten.neg.default, (node,)),))
    fold_cats_of_one(graph)
    assert (node.target, node.args) == (aten.clone.default, (value,))
    assert node.kwargs == {"memory_format": torch.contiguous_format}


def test_an_input_of_another_dtype_than_tracing_says_is_converted() -> None:
    """As the gradient of a group normalization in 16 bits, which tracing says has 32: compiled code reads memory."""
    graph, mode = torch.fx.Graph(), torch._subclasses.FakeTensorMode()
    given = graph.placeholder("given")
    negative = graph.call_function(aten.neg.default, (given,))
    given.meta["val"] = negative.meta["val"] = mode.from_tensor(torch.ones(3))
    graph.output((negative,))
    region = next(p for p in Partition(torch.fx.GraphModule({}, graph)).pieces if isinstance(p, Region))
    _, inputs = part_of(region)
    seen: list[torch.dtype] = []

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(tensors[0].dtype)
        return [-tensors[0]]

    CompiledRegion(run, inputs, region)([torch.ones(3, dtype=BFLOAT16)])
    assert seen == [torch.float32]
