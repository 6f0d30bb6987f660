"""Batches padded to few lengths, where the user says with what: one capture then serves all batches of a bucket.

Padded is dimension 1, the length of sequences, to the next of four lengths between two powers of two: at most a quarter
is added, an eighth on average. The first batch that is padded is run as it is, too, by the model itself, and must give
the same loss and the same gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import SignatureError, SpecError
from autopar.ir.batch import Batch, flatten
from autopar.ir.build import named_parameters
from autopar.runtime.model.eager import owners_of
from autopar.runtime.model.generators import generators, set_generators
from autopar.runtime.proofs.one_pass import differences, step_eagerly

Pad = Mapping[str | int, float]
"""What tensors of a batch are padded with: by the names of inputs, or by their positions in the batch."""

_SHORTEST = 8
_LENGTH = 1
"""The dimension that is padded."""


class Padding:
    """Pads the batches of a program."""

    def __init__(self, values: Pad, checks: bool) -> None:
        """`checks`: whether the first padded batch is compared with the batch itself. Raises `SpecError`."""
        for place, value in values.items():
            if isinstance(place, bool) or not isinstance(place, (str, int)) or not isinstance(value, (int, float)):
                raise SpecError(
                    f"pad holds {place!r}: {value!r}, expected the name or position of an input, and the number to pad "
                    'it with: pad={"input_ids": 0, "labels": -100, "attention_mask": 0}'
                )
        self._values = dict(values)
        self._checks = checks

    def of(self, batch: Any, model: nn.Module, loss_fn: Any, is_whole: bool) -> Batch:
        """The batch, flattened and padded. `is_whole`: whether all of the model is on this rank, so that it can be run.

        Raises `SignatureError` where it holds no such input, and where padding changes the loss or its gradients.
        """
        padded = flatten(self.padded(batch))
        if self._checks and is_whole:
            own = flatten(batch)
            if own.shapes != padded.shapes:
                self._checks = False
                _check(own, padded, model, loss_fn)
        return padded

    def padded(self, batch: Any) -> Any:
        """The batch, padded."""
        leaves, spec = pytree.tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
        found, changed = set(), []
        for place, (path, leaf) in enumerate(leaves):
            keys = [str(getattr(path[-1], "key", ""))] if path else []
            value = next((self._values[k] for k in (*keys, place) if k in self._values), None)
            found |= {k for k in (*keys, place) if k in self._values}
            changed.append(leaf if value is None else _pad(leaf, value, keys[0] if keys else f"tensor {place}"))
        if missing := [k for k in self._values if k not in found]:
            raise SignatureError(f"pad names {missing[0]!r}, which the batch does not hold")
        return pytree.tree_unflatten(changed, spec)


def bucket(length: int) -> int:
    """The length that one is padded to."""
    step = max(_SHORTEST, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def _pad(value: Any, fill: float, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dim() <= _LENGTH:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise SignatureError(
            f"pad names '{name}', which is {shape}: expected a tensor whose dimension {_LENGTH} is its length; leave "
            "out of pad what has none"
        )
    more = bucket(value.shape[_LENGTH]) - value.shape[_LENGTH]
    return F.pad(value, [0, 0] * (value.dim() - 1 - _LENGTH) + [0, more], value=fill) if more else value


def _check(own: Batch, padded: Batch, model: nn.Module, loss_fn: Any) -> None:
    """Runs the model on both, without dropout, whose masks would differ."""
    parameters = {n: p for n, p in named_parameters(model, loss_fn).items() if p.requires_grad}
    device = next(iter(parameters.values())).device
    precision = max(torch.finfo(p.dtype).eps for p in parameters.values()) ** 0.5
    random = generators()
    with _NoDropout():
        expected, found = (
            step_eagerly(owners_of(model, loss_fn), loss_fn, b.to(device), parameters, ()) for b in (own, padded)
        )
    set_generators(random)
    wrong = differences(found, expected, precision)
    if wrong:
        what = max(wrong, key=lambda n: wrong[n])
        raise SignatureError(
            f"a batch of {own.signature} that is padded to {padded.signature} does not train the model as it does "
            f"itself: {what} differs by {wrong[what]:.3g} times what rounding explains. Pad masks with what leaves "
            "padding out, and labels with what the loss ignores (-100 for cross-entropy); a model that takes no mask, "
            "or normalizes over the length, cannot be padded: leave pad= out"
        )


class _NoDropout(TorchFunctionMode):
    """While it is open, nothing is dropped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(getattr(func, "__name__", ""))
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)
