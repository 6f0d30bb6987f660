"""Tensors of a batch that lie in one memory, as the input of an autoencoder that is its target, too."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

import torch

from autopar.errors import AutoparWarning, CaptureError


def refuse_shared(written: Iterable[int], tensors: Sequence[torch.Tensor]) -> None:
    """Raises `CaptureError` where a model writes to these tensors of a batch and others are in their memory: they
    change as well, which they do not where the model is given copies."""
    for i in sorted(written):
        for j, other in enumerate(tensors):
            if j != i and _overlap(tensors[i], other):
                raise CaptureError(
                    f"the model writes to tensor {i} of the batch in its forward pass, whose memory tensor {j} of the "
                    "batch is in, too: write to a copy, or give each a memory of its own"
                )


def check_unwritten(given: Sequence[torch.Tensor], copied: Collection[int]) -> None:
    """Warns where a model has written to its batch otherwise than to copies, which its trace need not show: dropout
    without effect returns its input itself only when it runs. Raises as `refuse_shared`."""
    written = [i for i, t in enumerate(given) if t._version and i not in copied]
    refuse_shared(written, given)
    if written:
        warnings.warn(
            f"running the model changes tensor {written[0]} of the batch, which the captured step does not do: what "
            "reads it outside of the model finds what was there before",
            AutoparWarning,
            stacklevel=4,
        )


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of them are in one memory."""
    return any(len(places) > 1 for places in _overlapping(tensors))


def copies_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies, for a run that may write to them; those in one memory are in one again, unless there is much between
    them, as in windows of a data set."""
    found: dict[int, torch.Tensor] = {}
    for places in _overlapping(tensors):
        first, last = min(_begin(tensors[i]) for i in places), max(_end(tensors[i]) for i in places)
        much = last - first > _MUCH * sum(tensors[i].numel() for i in places)
        if len(places) == 1 or much or len({tensors[i].dtype for i in places}) > 1:
            found |= {i: tensors[i].clone() for i in places}
            continue
        flat = tensors[places[0]].detach().as_strided((last - first,), (1,), first).clone()
        for i in places:
            t = tensors[i]
            made = flat.as_strided(t.shape, t.stride(), _begin(t) - first)
            found[i] = made.detach().requires_grad_(t.requires_grad)
    return tuple(found[i] for i in range(len(tensors)))


_MUCH = 4
"""Elements between the first and the last of some tensors, for each of theirs, that are copied at most."""


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The tensors, by their places, together with those that they overlap with."""
    found: list[list[int]] = []
    of_memory: dict[int, list[int]] = {}
    for i, t in enumerate(tensors):
        memory = _memory_of(t)
        if memory is None:
            found.append([i])
        else:
            of_memory.setdefault(memory, []).append(i)
    for places in of_memory.values():
        groups: list[list[int]] = []
        for i in sorted(places, key=lambda i: _begin(tensors[i])):
            met = [g for g in groups if any(_overlap(tensors[i], tensors[j]) for j in g)]
            groups = [g for g in groups if g not in met]
            groups.append([*(j for g in met for j in g), i])
        found += groups
    return found


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element is in both. Of tensors with other strides, only whether they lie between one another."""
    memory = _memory_of(a)
    if memory is None or memory != _memory_of(b) or _begin(a) >= _end(b) or _begin(b) >= _end(a):
        return False
    if a.dtype != b.dtype or a.dim() != b.dim() or a.stride() != b.stride():
        return True
    dims = sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True)
    return _meet(_begin(b) - _begin(a), dims)


def _meet(apart: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether steps along dimensions lead from an element of one tensor to one of another that begins `apart` elements
    behind it. `dims`: their stride, and both sizes, the longest stride first."""
    if not dims:
        return apart == 0
    (stride, mine, theirs), *rest = dims
    if stride == 0:
        return _meet(apart, rest)
    steps = range(max(apart // stride, 1 - theirs), min(apart // stride + 1, mine - 1) + 1)
    return any(_meet(apart - step * stride, rest) for step in steps)


def _memory_of(t: torch.Tensor) -> int | None:
    if t.layout is not torch.strided or not t.numel():
        return None
    return int(t.untyped_storage()._cdata)


def _begin(t: torch.Tensor) -> int:
    return int(t.storage_offset()) if t.layout is torch.strided else 0


def _end(t: torch.Tensor) -> int:
    """In elements, as the beginning: of tensors of other formats in one memory, these are no common measure."""
    if t.layout is not torch.strided:
        return 0
    return _begin(t) + 1 + sum(s * (n - 1) for s, n in zip(t.stride(), t.shape, strict=True))
