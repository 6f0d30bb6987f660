"""Tensors of a batch that lie in one memory, as the input of an autoencoder that is its target, too."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch

from autopar.errors import AutoparWarning, CaptureError


def refuse_shared(written: Collection[int], tensors: Sequence[torch.Tensor]) -> None:
    """Raises `CaptureError` where a model writes to these tensors of a batch and others are in their memory: they
    change as well, which they do not where the model is given copies."""
    for i in sorted(written):
        for j, other in enumerate(tensors):
            if j != i and _memory_of(tensors[i]) == _memory_of(other) is not None:
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


def copies_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies, for a run that may write to them; those in one memory are in one again."""
    of_memory: dict[tuple[int | None, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        of_memory.setdefault((_memory_of(t), t.dtype), []).append(i)
    found: dict[int, torch.Tensor] = {}
    for (memory, _), places in of_memory.items():
        if memory is None or len(places) == 1:
            found |= {i: tensors[i].clone() for i in places}
            continue
        first, last = min(int(tensors[i].storage_offset()) for i in places), max(_end(tensors[i]) for i in places)
        flat = tensors[places[0]].detach().as_strided((last - first,), (1,), first).clone()
        for i in places:
            t = tensors[i]
            made = flat.as_strided(t.shape, t.stride(), int(t.storage_offset()) - first)
            found[i] = made.detach().requires_grad_(t.requires_grad)
    return tuple(found[i] for i in range(len(tensors)))


def _memory_of(t: torch.Tensor) -> int | None:
    if t.layout is not torch.strided or not t.numel():
        return None
    return int(t.untyped_storage()._cdata)


def _end(t: torch.Tensor) -> int:
    return int(t.storage_offset()) + 1 + sum(s * (n - 1) for s, n in zip(t.stride(), t.shape, strict=True))
