"""Tensors that a model holds for itself: their memory and their values, kept and put back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from autopar.errors import AutoparWarning
from autopar.formatting import size
from autopar.ir.batch import SPARSE
from autopar.runtime.model.in_place import LARGEST
from autopar.runtime.model.shared_memory import once


def held_values(tensors: Sequence[torch.Tensor], trained: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Keeps tensors where they are and what they are; what is returned puts that back.

    `trained`: the model's own parameters. Those of networks that are registered nowhere are copied where they take no
    more memory than these, and other tensors of up to `LARGEST` bytes; where one that was not copied has been written
    to when it is put back, that is said.
    """
    kept = [t for t in tensors if _is_kept(t)]
    hidden = [t for t in kept if isinstance(t, nn.Parameter)]
    too_large = sum(p.nbytes for p in hidden) > sum(p.nbytes for p in trained)
    left = [t for t in kept if (too_large if isinstance(t, nn.Parameter) else once(t).nbytes > LARGEST)]
    apart = set(map(id, left))
    homes = [(t, t.detach()) for t in kept]
    values = [(t, once(t).clone()) for t in kept if id(t) not in apart]
    versions = [t._version for t in left]
    sparse = [(t, t.detach().clone()) for t in tensors if _is_kept_sparse(t)]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value in sparse:
                if not all(map(torch.equal, _parts(tensor), _parts(value))):
                    tensor.resize_as_sparse_(value).copy_(value)
            for tensor, home in homes:
                if _place(tensor) != _place(home):
                    tensor.data = home
            for tensor, value in values:  # by their values: batch normalization writes without another version
                if not tensor.is_meta and not torch.equal(once(tensor), value):
                    once(tensor).copy_(value)
        written = [t for t, version in zip(left, versions, strict=True) if t._version != version]
        if written:
            what = "parameters of a network" if isinstance(written[0], nn.Parameter) else "a tensor"
            warnings.warn(
                f"running the model writes to {what} of {size(written[0].nbytes)} that is registered nowhere, as a "
                "moving average of weights or a memory of samples does, and autopar has run it more often than there "
                "are steps. For its size, no copy was kept: update it between steps, or fill it again",
                AutoparWarning,
                stacklevel=2,
            )

    return put_back


def _is_kept(t: torch.Tensor) -> bool:
    return _is_own(t) and t.layout is torch.strided


def _is_kept_sparse(t: torch.Tensor) -> bool:
    return _is_own(t) and t.layout in SPARSE and not t.is_meta and sum(p.nbytes for p in _parts(t)) <= LARGEST


def _is_own(t: torch.Tensor) -> bool:
    return type(t) in (torch.Tensor, nn.Parameter) and t.is_leaf and not t.is_inference()


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The indices and the values of a sparse tensor, in its own memory."""
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    in_rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    return [*((t.crow_indices(), t.col_indices()) if in_rows else (t.ccol_indices(), t.row_indices())), t.values()]


def _place(t: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return t.data_ptr(), tuple(t.shape), t.stride(), t.dtype
