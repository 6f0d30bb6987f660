"""Traces what tests build alike once in a process: tracing takes half of the time of tests that are not about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from autopar.ir import build
from autopar.ir.batch import Batch
from autopar.ir.capture import JointGraph
from autopar.ir.weightless import lacks_values


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Within it, models that are described alike, with a loss and a batch alike, have copies of one trace. Only for
    models of which all that they read in Python stands in their description, and for tests that change none of it:
    guards are those of the first such model."""
    trace: Callable[..., JointGraph] = vars(build)["capture_joint"]

    def traced(model: nn.Module, batch: Batch, loss_fn: Any, *how: Hashable) -> JointGraph:
        *form, varying = how if len(how) == 3 else (*how, None)
        if varying or any(map(lacks_values, batch.tensors)):
            return trace(model, batch, loss_fn, *how)
        key = (_described(model, loss_fn), _form(batch), *form)
        if key not in _traces:
            _traces[key] = trace(model, batch, loss_fn, *how), model, loss_fn
        return _traces[key][0].copied()

    with mock.patch.object(build, "capture_joint", traced):
        yield


_traces: dict[Hashable, tuple[JointGraph, nn.Module, Any]] = {}
"""With what they are of, which is kept alive: an address says whose it is only as long as it lives."""


def _described(model: nn.Module, loss_fn: Any) -> Hashable:
    modules = list(model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules), "hooks are traced each time"
    training, buffers = tuple(m.training for m in modules), tuple(n for n, _ in model.named_buffers())
    layouts = tuple((p.stride(), p.dtype) for p in (*model.parameters(), *model.buffers()))
    described = build.model_fingerprint(model, loss_fn), repr(model), training, buffers, layouts
    return (*described, loss_fn, torch.is_autocast_enabled("cpu"))


def _form(batch: Batch) -> Hashable:
    same = tuple(next(i for i, other in enumerate(batch.tensors) if other is t) for t in batch.tensors)
    return batch.signature, same, tuple(t.requires_grad for t in batch.tensors)
