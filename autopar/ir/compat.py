"""What PyTorch calls otherwise in the versions that autopar runs on (2.11 to 2.15), each thing under one name.

Asked is whether the newer name is there, never what version it is; where the oldest version that is supported has a
newer name, the older one goes from here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
import torch.fx.node
from torch._guards import detect_fake_mode
from torch._higher_order_ops.effects import has_effects
from torch.utils import _pytree as pytree

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers one tensor of each rank into one tensor, one rank's after the other's. Named so from 2.13 on."""


def at_trace_end(output_graph: type) -> str:
    """The method of TorchDynamo's class `OutputGraph` after whose first call, once a frame is traced, the effects of
    the traced code on Python objects are known and not yet forgotten. The first is there from 2.12 on."""
    return next(n for n in ("get_replayed_side_effect_source_refs", "compile_subgraph") if hasattr(output_graph, n))


def guards_attribute_itself(guard_builder: type) -> bool:
    """Whether the guard that TorchDynamo's class `GuardBuilder` makes for `hasattr(x, "y")` is one on `x.y`, and needs
    that to be an attribute; from 2.13 on it is one on `x`."""
    return "attr" not in signature(guard_builder.HASATTR).parameters  # type: ignore[attr-defined]


def with_captured_tensors(captured: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Lets AOTAutograd trace a graph of TorchDynamo's that reads tensors which are no inputs of it, as those of
    closures: the tracing's fake mode converts them where they are read. The graphs do so themselves from 2.13 on."""
    codegen: Any = captured.graph._codegen
    original = codegen.process_inputs
    if "allow_non_fake_inputs" in original.__code__.co_names:
        return captured

    def process_inputs(*inputs: Any) -> Any:
        results = original(*inputs)
        mode = detect_fake_mode()
        if mode is not None and pytree.tree_any(
            lambda x: isinstance(x, torch.Tensor) and not mode.is_our_fake(x), results
        ):
            mode.allow_non_fake_inputs = True
        return results

    codegen.process_inputs = process_inputs
    return captured


@contextlib.contextmanager
def kept_checks() -> Iterator[None]:
    """While it is open, tracing keeps linear algebra's check for singular matrices, which has no result, in the graph.
    It is an operator with effects from 2.13 on; before, tracing would drop it, and a step would go on with infinities
    where the model raises."""
    check = torch.ops.aten._linalg_check_errors.default
    known = torch.fx.node._side_effectful_functions
    if check in known or has_effects(check):
        yield
        return
    known.add(check)
    try:
        yield
    finally:
        known.discard(check)


_VARIABLE = re.compile(r"ConstantVariable\(\w+: (.*?)\)(?=, ConstantVariable\(|\]$)", re.DOTALL)


def plain_arguments(shown: str) -> str:
    """The arguments of an exception that the traced code has raised, as Python writes them; TorchDynamo's messages show
    them so from 2.13 on, and before as a list of its own variables."""
    plain = _VARIABLE.sub(r"\1", shown)
    return plain if plain == shown else plain.removeprefix("[").removesuffix("]")
