"""What is kept of a gradient to tell it from another: some of its elements, and projections of all of them.

A few dozen elements of each parameter show what is wrong everywhere; two random projections (the inner product with an
outer product of one random vector a dimension) show what is wrong in a single place. Both are linear, so that those of
a sum over ranks are the sums of theirs: kilobytes go over the network, and nobody holds a second copy of the gradients.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.gradient_modes import outside_of_autocast
from autopar.ops.fragments import Fragment
from autopar.ops.group import Group
from autopar.spec.plan import ParameterSlice

ELEMENTS = 32
"""Sampled of each parameter, the first and the last among them."""
PROJECTIONS = 2


@dataclass(frozen=True)
class Seen:
    """What was seen of one slice of a parameter's gradient."""

    flat: torch.Tensor
    """float64: the sampled elements that lie in the slice, `PROJECTIONS` projections, and the norm; of a sum, this is
    at most the sum of the norms."""

    @property
    def elements(self) -> torch.Tensor:
        return self.flat[: -PROJECTIONS - 1]

    @property
    def projections(self) -> torch.Tensor:
        return self.flat[-PROJECTIONS - 1 : -1]

    @property
    def norm(self) -> torch.Tensor:
        return self.flat[-1]


class Probe:
    """Looks at one slice of a parameter: at its gradient, at its value, at parts of either."""

    def __init__(self, piece: ParameterSlice, shape: Sequence[int]) -> None:
        self.piece = piece
        self.shape = tuple(shape)
        self.slice_shape = self._cut_shape()
        self.numel = math.prod(self.slice_shape)
        seed = zlib.crc32(str(piece).encode())
        some, draw = random.Random(seed), torch.Generator().manual_seed(seed)
        ends = [0, self.numel - 1][: self.numel]
        drawn = {*ends, *(some.randrange(self.numel) for _ in range(min(ELEMENTS, self.numel)))}
        self.indices = torch.tensor(sorted(drawn), dtype=torch.int64)
        """Of the sampled elements in the flattened slice, ascending."""
        self._every = torch.arange(len(self.indices))
        vectors = torch.randn(sum(self.slice_shape), PROJECTIONS, generator=draw, dtype=torch.float64)
        of_dims = torch.split(vectors, list(self.slice_shape))
        self._cut_at = _middle(self.slice_shape)
        self._rows = _outer(of_dims[: self._cut_at])
        """float64 [rows, PROJECTIONS] of the slice as a matrix, whose rows are its first `_cut_at` dimensions."""
        self._columns = _outer(of_dims[self._cut_at :]).T.contiguous()
        """float64 [PROJECTIONS, columns] of the same: products by its transpose take a fifth of the time."""

    @property
    def width(self) -> int:
        """Numbers in what is seen."""
        return len(self.indices) + PROJECTIONS + 1

    def elements(self, whole: torch.Tensor) -> torch.Tensor:
        """The sampled elements of a tensor of the parameter's shape, in its dtype."""
        return self.cut(whole).reshape(-1)[self.indices.to(whole.device)]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of a tensor of the parameter's shape."""
        if self.piece.whole:
            return whole
        assert self.piece.start is not None and self.piece.stop is not None
        return whole.narrow(self.piece.dim, self.piece.start, self.piece.stop - self.piece.start)

    @outside_of_autocast()  # whose products would be rounded to 16 bits
    def see(self, gradient: torch.Tensor) -> Seen:
        """What is kept of a whole parameter's gradient."""
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        return self._seen(self.cut(gradient), self.indices, self._rows, self._columns)

    @outside_of_autocast()
    def of_fragment(self, fragment: Fragment, gradient: torch.Tensor) -> tuple[torch.Tensor, Seen]:
        """What is kept of a part of the slice: which of the sampled elements it has, and what is seen of it."""
        which, places = self._places(fragment)
        if fragment.rows is not None:
            return which, self._seen(gradient, places, *self._vectors_of(fragment.rows))
        if fragment.tensor.numel() == self.numel:
            return which, self._seen(gradient, places, self._rows, self._columns)
        norm, values = _norm(gradient), _wide(gradient).reshape(-1)
        return which, _together(values, places, self._of_range(values, fragment.begin), norm)

    def _cut_shape(self) -> tuple[int, ...]:
        if self.piece.whole:
            return self.shape
        assert self.piece.start is not None and self.piece.stop is not None
        sizes = list(self.shape)
        sizes[self.piece.dim] = self.piece.stop - self.piece.start
        return tuple(sizes)

    def _places(self, fragment: Fragment) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the sampled elements the fragment holds, and where in its flattened memory."""
        if fragment.rows is None and fragment.tensor.numel() == self.numel:
            return self._every, self.indices
        if fragment.rows is None:
            places = self.indices - fragment.begin
            held = (places >= 0) & (places < fragment.tensor.numel())
        else:
            row_elements = math.prod(self.slice_shape[1:])
            first, step = fragment.rows.start or 0, fragment.rows.step or 1
            row, rest = self.indices // row_elements, self.indices % row_elements
            held = (row >= first) & ((row - first) % step == 0) & ((row - first) // step < len(fragment.tensor))
            places = (row - first) // step * row_elements + rest
        which = torch.nonzero(held).reshape(-1)
        return which, places[which]

    def _vectors_of(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """What projects some rows of the slice, along its first dimension."""
        first, *others = self.slice_shape
        if self._cut_at == 0:
            columns = self._columns.view(PROJECTIONS, first, math.prod(others))[:, rows]
            return self._rows, columns.flatten(1)
        each = math.prod(others[: self._cut_at - 1])
        return self._rows.view(first, each, PROJECTIONS)[rows].flatten(0, 1), self._columns

    def _seen(self, gradient: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> Seen:
        """Of a matrix whose rows and columns are multiplied by such vectors, in any shape."""
        norm, values = _norm(gradient), _wide(gradient).reshape(len(rows), columns.shape[1])
        by_rows = values @ columns.to(values).T
        return _together(values.reshape(-1), places, (by_rows * rows.to(values.device)).sum(0), norm)

    def _of_range(self, values: torch.Tensor, begin: int) -> torch.Tensor:
        """The projections of elements that lie in a row from `begin` on: of the end of a row, of whole rows, and of the
        beginning of one."""
        width, size = self._columns.shape[1], len(values)
        rows, columns = self._rows.to(values.device), self._columns.to(values).T
        head = min(-begin % width, size)
        tail = (size - head) % width
        first, last = -(-begin // width), (begin + size) // width
        whole = values[head : size - tail].reshape(-1, width) @ columns
        found = (whole * rows[first : first + len(whole)]).sum(0)
        if head:
            found = found + (values[:head] @ columns[begin % width :][:head]) * rows[begin // width]
        if tail:
            found = found + (values[size - tail :] @ columns[:tail]) * rows[last]
        return found


def probes(groups: Sequence[Group]) -> dict[str, Probe]:
    """A probe for each member of each group, by what it is called: `weight[0:3]`."""
    return {str(m.slice): Probe(m.slice, m.parameter.spec.shape) for g in groups for m in g.members}


def _middle(shape: Sequence[int]) -> int:
    """Before which dimension a tensor is cut into the rows and columns of a matrix that has the fewest of both."""
    return min(range(len(shape) + 1), key=lambda i: math.prod(shape[:i]) + math.prod(shape[i:]))


def _outer(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The outer products of a vector a dimension, flattened: [elements, PROJECTIONS]."""
    found = torch.ones(1, PROJECTIONS, dtype=torch.float64)
    for v in vectors:
        found = (found.unsqueeze(1) * v).reshape(len(found) * len(v), PROJECTIONS)
    return found


def _together(values: torch.Tensor, places: torch.Tensor, projections: torch.Tensor, norm: torch.Tensor) -> Seen:
    elements = values[places.to(values.device)]
    return Seen(torch.cat([elements, projections, norm.reshape(1)]).double().cpu())


def _norm(t: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    norm: torch.Tensor = torch.linalg.vector_norm(parts, dtype=_wide_dtype(parts))
    return norm


def _wide(t: torch.Tensor) -> torch.Tensor:
    """In a dtype that sums can be computed in; of complex numbers, the sum of both parts: real, and linear as all that
    is kept."""
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj()).sum(-1)
    return t.to(_wide_dtype(t))


def _wide_dtype(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
