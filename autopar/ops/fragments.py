"""Fragments: which part of which parameter lies where in a group's flat value.

A group's flat value is its members, flattened, one after the other. A rank that holds elements [a, b) of it holds
a fragment of each member that this range touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from autopar.ops.group import Group
from autopar.ops.products import Product, rows_of_piece
from autopar.spec.plan import ParameterSlice


@dataclass(frozen=True)
class Fragment:
    """A part of a parameter that one rank updates or stores."""

    name: str
    whole: bool
    """Whether it is the whole parameter."""
    tensor: torch.Tensor
    """The parameter itself, or a view into its memory."""
    piece: ParameterSlice
    begin: int
    """Where the fragment begins in the flattened slice."""
    start: int
    """Where its elements begin in the flat value of the rank that holds them."""
    rows: slice | None = None
    """Of a parameter that is spread over the ranks: which rows of it these are."""
    parameter: torch.Tensor | None = None
    """Whose fragment this is; `None` of one that is spread over the ranks. Mostly `tensor` lies in its memory; but not
    where the fragment is a part of what is not contiguous, or where the parameter was given other memory since."""

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This fragment's elements of a flat value, in the fragment's shape."""
        return flat[self.start : self.stop].view(self.tensor.shape)

    def now(self) -> torch.Tensor:
        """The fragment's elements of the parameter, where they lie now; a copy of a part of what is not contiguous."""
        if self.parameter is None:
            return self.tensor
        return _cut(self.parameter.detach(), self.piece, self.begin, self.tensor.numel())

    def put(self, values: torch.Tensor) -> None:
        """Writes values into the parameter, where its elements lie now."""
        now, parameter = self.now(), self.parameter
        now.copy_(values)
        if parameter is not None and now.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            whole = _slice(parameter.detach(), self.piece)
            flat = whole.reshape(-1)
            flat[self.begin : self.begin + now.numel()] = now.reshape(-1)
            whole.copy_(flat.view(whole.shape))

    def read(self) -> None:
        """Copies the parameter's elements here, where they lie elsewhere."""
        if self._lies_elsewhere():
            self.tensor.copy_(self.now())

    def write(self) -> None:
        """Copies the elements to the parameter, where they lie elsewhere. Parts of slices are sent, and stored by every
        rank."""
        if self._lies_elsewhere() and self.parameter is not None:
            whole = _slice(self.parameter.detach(), self.piece)
            if whole.numel() == self.tensor.numel():
                whole.copy_(self.tensor)

    def _lies_elsewhere(self) -> bool:
        if self.parameter is None or self.whole:
            return False
        return self.tensor.untyped_storage().data_ptr() != self.parameter.untyped_storage().data_ptr()

    def cut(self, like: torch.Tensor) -> torch.Tensor:
        """The same part of another tensor of the parameter's shape: a gradient, or optimizer state."""
        if self.rows is not None:
            return like[self.rows]
        return _cut(like, self.piece, self.begin, self.tensor.numel())


def fragments(
    group: Group, parameters: dict[str, torch.nn.Parameter], begin: int = 0, end: int | None = None
) -> tuple[Fragment, ...]:
    """The fragments that elements [begin, end) of the group's flat value consist of."""
    end = group.elements if end is None else end
    found, offset = [], 0
    for member in group.members:
        a, b = max(begin, offset), min(end, offset + member.elements)
        if a < b:
            parameter = parameters[member.slice.name]
            whole = b - a == member.elements and member.slice.whole
            tensor = parameter if whole else _cut(parameter.detach(), member.slice, a - offset, b - a)
            found.append(
                Fragment(member.slice.name, whole, tensor, member.slice, a - offset, a - begin, parameter=parameter)
            )
        offset += member.elements
    return tuple(found)


def rows_of_rank(rank: int, world_size: int) -> slice:
    """Which rows of a parameter a rank keeps, where they are spread over the ranks."""
    return slice(rank, None, world_size)


def own_rows(group: Group, shards: Mapping[str, torch.Tensor], rank: int, world_size: int) -> tuple[Fragment, ...]:
    """Fragments for the rows of each of a group's parameters that a rank keeps: one, or as many as their gradient is
    formed in."""
    found, start = [], 0
    for member in group.members:
        shard = shards[member.slice.name]
        product = member.parameter.head is not None or member.parameter.layer is not None
        count = rows_of_piece(shard) if product else len(shard)
        for first in range(0, max(1, len(shard)), max(1, count)):
            piece = shard[first : first + count]
            rows = slice(rank + world_size * first, rank + world_size * (first + len(piece)), world_size)
            found.append(Fragment(member.slice.name, False, piece, member.slice, 0, start, rows))
            start += piece.numel()
    return tuple(found)


Formed = torch.Tensor | Callable[[], torch.Tensor]
"""A gradient, or what forms it as it is used."""


def of_fragments(parts: Sequence[Fragment], gradients: Iterable[torch.Tensor | Product]) -> list[Formed]:
    """The gradient of each fragment, from those of the rows of whole parameters."""
    found: list[Formed] = []
    for (_, group), gradient in zip(groupby(parts, lambda f: id(f.piece)), gradients, strict=True):
        first, own = 0, list(group)
        for fragment in own:
            count = len(fragment.tensor) if fragment.tensor.dim() else 1
            if isinstance(gradient, Product):
                found.append(partial(gradient.rows, first, count))
            else:
                found.append(gradient if len(own) == 1 else gradient[first : first + count])
            first += count
    return found


def _cut(tensor: torch.Tensor, piece: ParameterSlice, begin: int, elements: int) -> torch.Tensor:
    """`elements` elements of a slice of `tensor`, from `begin` on, in the order of its indices; the whole slice keeps
    its shape. A view, but of a part of a slice that is not contiguous."""
    tensor = _slice(tensor, piece)
    return tensor if elements == tensor.numel() else tensor.reshape(-1)[begin : begin + elements]


def _slice(tensor: torch.Tensor, piece: ParameterSlice) -> torch.Tensor:
    if piece.whole:
        return tensor
    assert piece.start is not None and piece.stop is not None
    return tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)


def views_of(parts: Sequence[Fragment], flat: torch.Tensor) -> list[torch.Tensor]:
    """Each fragment's elements of a flat value that consists of them, in the fragment's shape."""
    tensors = [f.tensor for f in parts]
    sizes = [t.numel() for t in tensors]
    # PyTorch's own function takes a third of the time of views from Python. It forgets the shape of a tensor without
    # elements, and does not look whether elements are left over.
    if all(sizes) and sum(sizes) == flat.numel() > 0:
        return list(torch._C._nn.unflatten_dense_tensors(flat, tensors))
    pieces = flat.split_with_sizes(sizes)
    return [x.view(t.shape) for t, x in zip(tensors, pieces, strict=True)]


def pack(tensors: Sequence[torch.Tensor], dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Flattens, concatenates and casts, in one pass over the elements; and multiplies, before it rounds."""
    if len(tensors) > 1 and all(t.dtype == dtype and t.is_contiguous() for t in tensors):
        flat = torch.cat([t.view(-1) for t in tensors])  # half of the time that many views take
        return flat if scale is None else flat.mul_(scale)
    total = sum(t.numel() for t in tensors)
    flat = torch.empty(total, dtype=dtype, device=tensors[0].device)
    views, offset = [], 0
    for t in tensors:
        views.append(flat[offset : offset + t.numel()].view(t.shape))
        offset += t.numel()
    if scale is not None and dtype != tensors[0].dtype:
        tensors, scale = [t * scale for t in tensors], None
    torch._foreach_copy_(views, list(tensors))
    return flat if scale is None else flat.mul_(scale)
