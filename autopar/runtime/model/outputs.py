"""A model's output, taken apart into tensors by its graph, and put together again."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ir.batch import Batch, call_model, inputs_and_target
from autopar.ir.model_output import PLAIN, output_tensors
from autopar.ir.untraceable import cumulative_averages
from autopar.runtime.model.eager import kept_attributes, without_trace

NO_OUTPUT = (
    "under this plan no rank computes all of the model's output, for ranks share a layer out that makes it: pass "
    "outputs=True to autopar.optimize (and to autopar.plan), and plan again; or run the model within "
    "'with program.gathered():'"
)


def output_template(model: nn.Module, batch: Batch, has_loss_fn: bool = False) -> Any:
    """The model's output for a batch, with tensors that have no values; nothing is left in the model. `has_loss_fn`:
    whether a tuple batch is the model's inputs and a target. Nothing is computed, but for a model that looks at values
    on its way, to print or check them: it runs."""
    put_back, caches = kept_attributes([model]), _caches()
    try:
        try:
            return _with_fake_tensors(model, batch, has_loss_fn)
        finally:
            put_back()
            _forget(caches)
    except Exception:  # what a value that is not there leads to; what is the model's own comes again
        return _run(model, batch, has_loss_fn)
    finally:
        _forget(caches)


def _caches() -> dict[_lru_cache_wrapper[Any], int]:
    """Functions with a cache of results, but for PyTorch's own, and how often each has been missed."""
    # Each refers to its type: looking for those takes half as long as looking through all objects here.
    found = (f for f in gc.get_referrers(_lru_cache_wrapper) if type(f) is _lru_cache_wrapper)
    return {f: f.cache_info().misses for f in found if not str(f.__module__).startswith("torch.")}


def _forget(caches: dict[_lru_cache_wrapper[Any], int]) -> None:
    """Empties the caches that have been missed since: they hold fake tensors, which would be used later on."""
    for function, misses in caches.items():
        if function.cache_info().misses > misses:
            function.cache_clear()


def _run(model: nn.Module, batch: Batch, has_loss_fn: bool) -> Any:
    copies = batch.rebuild(tuple(t.detach().clone() for t in batch.tensors))
    with without_trace({"": model}), torch.enable_grad():
        output, _ = call_model(model, copies, has_loss_fn)
    return fill(output, (torch.empty_like(t, device="meta") for t in output_tensors(output)))


def _with_fake_tensors(model: nn.Module, batch: Batch, has_loss_fn: bool) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), cumulative_averages(model):
        state: dict[str, torch.Tensor] = {
            n: mode.from_tensor(t) for n, t in [*model.named_parameters(), *model.named_buffers()]
        }
        tensors = tuple(mode.from_tensor(t) for t in batch.tensors)
        inputs, _ = inputs_and_target(batch.rebuild(tensors), has_loss_fn)
        if isinstance(inputs, dict):
            return torch.func.functional_call(model, state, (), inputs)
        return torch.func.functional_call(model, state, tuple(inputs) if isinstance(inputs, list) else inputs)


def holds_numbers(template: Any) -> bool:
    """Whether an output has whole or other numbers that are no tensors."""
    if isinstance(template, dict):
        return any(map(holds_numbers, template.values()))
    if isinstance(template, (tuple, list)):
        return any(map(holds_numbers, template))
    if dataclasses.is_dataclass(template):
        return any(holds_numbers(getattr(template, one.name)) for one in dataclasses.fields(template))
    return isinstance(template, (int, float)) and not isinstance(template, bool)


def fill(template: Any, values: Iterator[torch.Tensor]) -> Any:
    """The template with real tensors; caches and other objects that hold tensors of their own become `None`."""
    if isinstance(template, torch.Tensor):
        return next(values)
    if isinstance(template, dict):
        held = {k: fill(v, values) for k, v in template.items()}
        if type(template) is dict or not all(isinstance(key, str) for key in held):
            return held if type(template) is dict else type(template)(held)
        return type(template)(**held)
    if isinstance(template, (tuple, list)):
        items = [fill(v, values) for v in template]
        return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
    if dataclasses.is_dataclass(template):
        filled = copy.copy(template)
        for one in dataclasses.fields(template):
            object.__setattr__(filled, one.name, fill(getattr(template, one.name), values))
        return filled
    return template if isinstance(template, PLAIN) else None
