"""What a model returns: the loss in it, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.ir.batch import Weighted
from autopar.ir.terms import sum_of_terms


def find_loss(output: Any, batch: Any = None) -> Any:
    """The loss in a model's output: the output itself where it is a tensor, else its `loss`, or the first element of a
    tuple that holds no other scalar; of a batch that has shares in several terms, the sum of these shares."""
    if isinstance(batch, Weighted):
        return sum_of_terms(output, batch.shares)
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output and _is_scalar(output[0]):
        loss = output[0]
        if any(_is_scalar(t) and t.requires_grad for t in output_tensors(output[1:])):
            raise CaptureError(
                f"the model's output ({type(output).__name__}) holds several scalars, each of which may be the loss or "
                "a part of it: return them added up as one loss, or say which it is in a dict with 'loss'"
            )
    if loss is None:
        raise CaptureError(
            f"the model's output ({type(output).__name__}) holds no loss: pass labels in the batch so that the "
            "model computes one, return the loss from the model, or pass loss_fn="
        )
    return loss


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


PLAIN: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, range, slice, Enum, type, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of what a model may return besides tensors, as it is."""


def check_output(output: Any) -> None:
    """Raises `CaptureError` where a model's output holds an object that no graph makes. A cache of keys and values, as
    models of transformers return it, is none that training needs."""
    if isinstance(output, (torch.Tensor, *PLAIN)):
        return
    if isinstance(output, dict):
        for value in output.values():
            check_output(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            check_output(value)
    elif is_dataclass(output):
        for one in fields(output):
            check_output(getattr(output, one.name))
    else:
        kind = type(output)  # whose module TorchDynamo does not tell of Python's own
        if not ("Cache" in kind.__name__ and kind.__module__.startswith("transformers")):
            raise CaptureError(
                f"the model returns an object of type {kind.__name__}, in which a graph sees no tensors: return them "
                "in a tuple, a dict or a dataclass"
            )


def output_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a model's output, in order; caches and other objects are passed over."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from output_tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from output_tensors(value)
    elif not isinstance(output, PLAIN) and is_dataclass(output):
        for one in fields(output):
            yield from output_tensors(getattr(output, one.name))
