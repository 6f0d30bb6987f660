"""A model's output, taken apart into tensors by its graph, and put together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ir.batch import Batch, inputs_and_target
from autopar.ir.untraceable import cumulative_averages
from autopar.runtime.eager import kept_attributes

NO_OUTPUT = (
    "under this plan no rank computes all of the model's output, for ranks share a layer out that makes it: pass "
    "outputs=True to autopar.optimize (and to autopar.plan), and plan again; or run the model within "
    "'with program.gathered():'"
)


def output_template(model: nn.Module, batch: Batch, has_loss_fn: bool = False) -> Any:
    """The model's output for a batch, with fake tensors; nothing is computed, and nothing is left in the model.
    `has_loss_fn`: whether a tuple batch is the model's inputs and a target."""
    put_back = kept_attributes([model])
    try:
        return _with_fake_tensors(model, batch, has_loss_fn)
    finally:
        put_back()


def _with_fake_tensors(model: nn.Module, batch: Batch, has_loss_fn: bool) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), cumulative_averages(model):
        state: dict[str, torch.Tensor] = {
            n: mode.from_tensor(t) for n, t in [*model.named_parameters(), *model.named_buffers()]
        }
        tensors = tuple(mode.from_tensor(t) for t in batch.tensors)
        inputs, _ = inputs_and_target(batch.rebuild(tensors), has_loss_fn)
        if isinstance(inputs, dict):
            return torch.func.functional_call(model, state, (), inputs)
        return torch.func.functional_call(model, state, tuple(inputs) if isinstance(inputs, list) else inputs)


def fill(template: Any, values: Iterator[torch.Tensor]) -> Any:
    """The template with real tensors; caches and other objects that hold tensors of their own become `None`."""
    if isinstance(template, torch.Tensor):
        return next(values)
    if isinstance(template, dict):
        return type(template)(**{k: fill(v, values) for k, v in template.items()})
    if isinstance(template, (tuple, list)):
        items = [fill(v, values) for v in template]
        return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
    if dataclasses.is_dataclass(template):
        filled = copy.copy(template)
        for one in dataclasses.fields(template):
            object.__setattr__(filled, one.name, fill(getattr(template, one.name), values))
        return filled
    return template if isinstance(template, (bool, int, float, str, type(None))) else None
