"""Batches: how a batch is handed to the model, flattened to tensors, and told from another.

A batch is a dict (keyword inputs), a tuple or list (positional inputs), or one tensor. With a `loss_fn`, a
tuple batch is `(inputs, target)`: the model gets `inputs`, the loss gets the model's output and `target`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autopar.errors import CaptureError, SignatureError
from autopar.ir.batch_memory import copies_of, overlap
from autopar.ir.constants import constant
from autopar.ir.form import Form, Held, taken_apart
from autopar.ir.held_tensors import held_tensors
from autopar.ir.listed import listed

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Layouts of sparse tensors, which have no strides."""


@dataclass(frozen=True)
class Signature:
    """What a captured graph is valid for: the batch's structure, shapes and dtypes, and its constants."""

    structure: str
    leaves: tuple[Any, ...]
    """`(shape, dtype)` for tensors, with their strides behind where they are not contiguous, or with the layout where
    they are sparse; a `Constant` for anything else."""

    @property
    def of_any_size(self) -> Signature:
        """The same of all batches that differ in the sizes of contiguous tensors alone."""
        general = [(len(x[0]), x[1]) if _is_tensor_key(x) and len(x) == 2 else x for x in self.leaves]
        return replace(self, leaves=tuple(general))

    def __str__(self) -> str:
        parts = [
            f"{tuple(x[0])} {str(x[1]).removeprefix('torch.')}" if _is_tensor_key(x) else repr(x) for x in self.leaves
        ]
        return ", ".join(parts)


def _is_tensor_key(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) in (2, 3) and isinstance(leaf[1], torch.dtype)


def _tensor_key(x: torch.Tensor) -> tuple[Any, ...]:
    if x.layout in SPARSE:
        return tuple(x.shape), x.dtype, x.layout
    return (tuple(x.shape), x.dtype) if x.is_contiguous() else (tuple(x.shape), x.dtype, x.stride())


@dataclass(frozen=True)
class Batch:
    """A batch, flattened: `tensors` are what a captured graph takes."""

    tensors: tuple[torch.Tensor, ...]
    signature: Signature
    form: Form
    constants: tuple[Any, ...]
    """The leaves that are no tensors, in their places; tensors are `None` here."""
    is_tensor: tuple[bool, ...]
    listed: int | None = None
    """Samples in a batch that lists them; `None` where they lie side by side in its tensors."""
    given: tuple[torch.Tensor, ...] = ()
    """Its tensors before they were laid out anew, where some of those were in one memory; else empty."""
    unseen: str = ""
    """Why no graph can be made for it, as it holds what a graph does not see; empty where one can."""

    @property
    def size(self) -> int | None:
        """Samples in the batch: the dicts or dataclasses of a list of these, else dimension 0 of its first tensor that
        has one; those that a graph does not see come last."""
        if self.listed is not None:
            return self.listed
        shown = (int(t.shape[0]) for t in self.tensors if t.dim() > 0)
        hidden = (int(t.shape[0]) for t in (held_tensors(self.constants) if self.unseen else ()) if t.dim() > 0)
        return next(shown, next(hidden, None))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of its tensors."""
        return shapes_of(self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tensors, as a user would write them: `batch['mask']`, `batch[0]`."""
        try:
            return tuple(n for n, x in self.form.placed(self.rebuild(self.tensors)) if isinstance(x, torch.Tensor))
        except ValueError:  # a container of the user's, registered without keys
            return tuple(f"tensor {i} of the batch" for i in range(len(self.tensors)))

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        given = tuple(t.to(device) for t in self.given)
        return replace(self, tensors=tuple(t.to(device) for t in self.tensors), given=given)

    def leaves(self) -> Batch:
        """The batch with tensors that have no history: what is captured begins with them."""
        tensors, given = (
            tuple(t.detach().requires_grad_(t.requires_grad) for t in of) for of in (self.tensors, self.given)
        )
        return replace(self, tensors=tensors, given=given)

    def rebuild(self, tensors: tuple[torch.Tensor, ...], made: list[Held] | None = None) -> Any:
        """The batch in its original structure, with other tensors in place of its own. `made` takes the dataclasses in
        it, which are other ones than the batch's."""
        it = iter(tensors)
        leaves = [next(it) if t else c for t, c in zip(self.is_tensor, self.constants, strict=True)]
        return self.form.rebuild(iter(leaves), [] if made is None else made)

    def copied(self) -> tuple[torch.Tensor, ...]:
        """Copies of its tensors, for a run that may write to them."""
        return copies_of(self.as_given)

    @property
    def as_given(self) -> tuple[torch.Tensor, ...]:
        """Its tensors as the user has them, for a model that runs eagerly: in one memory where they are."""
        return self.given or self.tensors


class Weighted(NamedTuple):
    """A batch, with its share in each term of a loss of several terms."""

    batch: Any
    shares: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
    """float64 scalars, by the terms' names or in their order."""


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The shapes of tensors."""
    return tuple(tuple(t.shape) for t in tensors)


def flatten(batch: Any, needs_tensor: bool = True) -> Batch:
    """Flattens a batch; raises `SignatureError` where it holds no tensor, and one is needed."""
    if isinstance(batch, Mapping) and type(batch) is not dict:
        batch = dict(batch)  # Hugging Face's BatchEncoding and the like
    leaves, form = taken_apart(batch)
    given = tuple(x for x in leaves if isinstance(x, torch.Tensor))
    leaves = [_laid_out(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    is_tensor = tuple(isinstance(x, torch.Tensor) for x in leaves)
    tensors = tuple(x for x in leaves if isinstance(x, torch.Tensor))
    constants = tuple(None if t else x for t, x in zip(is_tensor, leaves, strict=True))
    keys = [(_tensor_key(x), "") if t else constant(x) for t, x in zip(is_tensor, leaves, strict=True)]
    key, why = tuple(key for key, _ in keys), next((why for _, why in keys if why), "")
    if not tensors and needs_tensor and not why:
        raise SignatureError(
            f"the batch holds no tensor (it is a {type(batch).__name__}): expected a dict of keyword inputs, "
            "a tuple of positional inputs, or one tensor"
        )
    laid_out = any(a is not b for a, b in zip(given, tensors, strict=True))
    kept = given if laid_out and not any(t.is_inference() for t in given) and overlap(given) else ()
    return Batch(tensors, Signature(str(form), key), form, constants, is_tensor, listed(batch), kept, why)


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    """A tensor in one of few layouts, so that few graphs are captured: as it is where it is contiguous or its
    dimensions are merely in another order (channels last, transposed); else a contiguous copy. One that was made within
    `torch.inference_mode()` is copied, as autograd would not take it."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        x = x.clone()
    if x.layout is not torch.strided:
        return x
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.is_contiguous():
        # Where a dimension has one element, its stride says nothing, but convolutions choose their layout by it.
        usual = _contiguous_strides(x.shape)
        return x if x.stride() == usual else x.as_strided(x.shape, usual)
    order = sorted(range(x.dim()), key=lambda d: (x.stride()[d], x.shape[d]), reverse=True)
    return x if x.permute(order).is_contiguous() else x.contiguous()


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def bind(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, all by keyword. Raises `SignatureError` where they do not fit the model's `forward`, and
    `CaptureError` where it takes some by position only."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        hint = _hint_of_one(signature, len(args) + len(kwargs))
        raise SignatureError(f"{type(model).__name__}.forward{signature}: {e}{hint}") from e
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            if isinstance(model, torch._dynamo.OptimizedModule):
                raise CaptureError(
                    "the model was compiled by torch.compile, whose code no graph sees: pass the model itself, with "
                    "compile=True to have inductor compile what is captured"
                )
            raise CaptureError(
                f"{type(model).__name__}.forward takes '{name}' by position only, which cannot be captured: give its "
                "inputs names"
            )
        else:
            named[name] = value
    return named


def module_batch(model: torch.nn.Module, inputs: Any, needs_tensor: bool = True) -> Batch:
    """A batch as a drop-in module's `forward` sees it: all inputs by keyword. Raises `SignatureError`."""
    if isinstance(inputs, dict) or hasattr(inputs, "keys"):
        return flatten(bind(model, (), dict(inputs)), needs_tensor)
    by_place = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return flatten(bind(model, by_place, {}), needs_tensor)


def inputs_and_target(batch: Any, has_loss_fn: bool) -> tuple[Any, Any]:
    """What of a batch the model is given, and what its loss function; raises `SignatureError` for a tuple that is not
    both. A batch of one piece is both."""
    if isinstance(batch, Weighted):
        batch = batch.batch
    if not (has_loss_fn and isinstance(batch, (tuple, list))):
        return batch, batch
    if len(batch) != 2:
        raise SignatureError(f"with loss_fn, a tuple batch is (inputs, target); this one has {len(batch)} elements")
    return batch[0], batch[1]


def call_model(model: torch.nn.Module, batch: Any, has_loss_fn: bool) -> tuple[Any, Any]:
    """Calls the model on a batch; returns its output and the target for the loss function."""
    inputs, target = inputs_and_target(batch, has_loss_fn)
    if isinstance(inputs, Mapping):
        return model(**inputs), target
    if isinstance(inputs, (tuple, list)):
        return model(*inputs), target
    return model(inputs), target


def misfit(model: torch.nn.Module, batch: Any, has_loss_fn: bool) -> SignatureError | None:
    """Says why the model's `forward` cannot be called with a batch; `None` where it can."""
    batch = batch.batch if isinstance(batch, Weighted) else batch
    inputs = batch[0] if has_loss_fn and isinstance(batch, (tuple, list)) else batch
    by_name = dict(inputs) if isinstance(inputs, Mapping) else {}
    by_place = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    signature, name = inspect.signature(model.forward), type(model).__name__
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as e:
        unknown = [f"'{key}'" for key in by_name if key not in signature.parameters]
        if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
            return SignatureError(
                f"{name}.forward{signature} takes no {', '.join(unknown)}, which the batch holds: pass only what "
                "forward takes, {k: batch[k] for k in ...}"
            )
        hint = _hint_of_one(signature, len(by_place) + len(by_name))
        return SignatureError(f"{name}.forward{signature} cannot be called with this batch: {e}{hint}")
    return None


def _hint_of_one(signature: inspect.Signature, given: int) -> str:
    """What to pass where `forward` takes one argument and a batch has several."""
    if len(signature.parameters) != 1 or given == 1:
        return ""
    return ". Where forward is to take all of them as one argument, as a named tuple, pass a tuple of one, (batch,)"


def example_batch(model: torch.nn.Module) -> Any:
    """A batch from the model itself: Lightning's `example_input_array`, or Hugging Face's `dummy_inputs`."""
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return example
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, Mapping) and dummy:
        batch = dict(dummy)
        if "labels" not in batch and "input_ids" in batch:
            batch["labels"] = batch["input_ids"].clone()
        return batch
    raise SignatureError(
        f"{type(model).__name__} carries no example inputs (`example_input_array` or `dummy_inputs`): pass "
        "example_inputs=batch, with one batch as the training loop would pass it"
    )
