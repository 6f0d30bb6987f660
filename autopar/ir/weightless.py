"""Tensors without values: those of a model that was made on the `meta` device or under fake tensors, to be planned for.

A capture looks at shapes, dtypes and devices, and never at a parameter's values. But operators on the `meta` device are
others than those of the training, and constants that `forward` makes lie elsewhere. So tensors without values are
traced as if they lay on the device of the training. What asks for a value is refused by PyTorch while it traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.utils import _pytree as pytree


def lacks_values(t: torch.Tensor) -> bool:
    """Whether a tensor has a shape and a dtype, but no values: one on the `meta` device, or a fake one."""
    return t.device.type == "meta" or is_fake(t)


def first_without_values(model: nn.Module, loss_fn: Any = None) -> str:
    """The name of the first parameter or buffer of the model, or of a loss module, that has no values; empty where all
    have."""
    for owner, prefix in ((model, ""), (loss_fn, "loss_fn.")):
        if isinstance(owner, nn.Module):
            for name, t in (*owner.named_parameters(), *owner.named_buffers()):
                if lacks_values(t):
                    return prefix + name
    return ""


@contextlib.contextmanager
def traced_as_real(module: nn.Module, batch: Iterable[torch.Tensor]) -> Iterator[None]:
    """While it is open, tracing takes tensors on the `meta` device for tensors on the device of the training: that of
    the first of the module's tensors, and of the batch's, that says one; else the CPU. Nothing is done where all of
    them have values."""
    tensors = [*module.parameters(), *module.buffers(), *batch]
    if not any(map(lacks_values, tensors)):
        yield
        return
    device = next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))
    describe = MetaTensorDescriber.describe_tensor

    def described(self: MetaTensorDescriber, t: torch.Tensor, **settings: Any) -> Any:
        found = describe(self, t, **settings)
        return replace(found, device=device) if found.device.type == "meta" else found

    MetaTensorDescriber.describe_tensor = described  # type: ignore[method-assign]
    try:
        with _held_fakes_on_meta(module):
            yield
    finally:
        MetaTensorDescriber.describe_tensor = describe  # type: ignore[method-assign]


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """While it is open, tensors that are made are real, also where a caller has fake tensors or the `meta` device
    made."""
    with unset_fake_temporarily(), contextlib.ExitStack() as stack:
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def _held_fakes_on_meta(module: nn.Module) -> Iterator[None]:
    """While it is open, modules hold a tensor on the `meta` device in the place of each fake one that is neither
    parameter nor buffer: a graph of TorchDynamo's may hold no fake ones."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    twins: dict[int, torch.Tensor] = {}

    def twin(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in twins:
            twins[id(t)] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        return twins[id(t)]

    for m in module.modules():
        for key, value in m.__dict__.items():
            if key not in ("_parameters", "_buffers", "_modules") and pytree.tree_any(is_fake, value):
                before.append((m.__dict__, key, value))
    try:
        for held, key, value in before:
            held[key] = pytree.tree_map(lambda x: twin(x) if is_fake(x) else x, value)
        yield
    finally:
        for held, key, value in before:
            held[key] = value
