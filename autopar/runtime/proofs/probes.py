"""What is kept of a gradient to tell it from another: some of its elements, and projections of all of them.

A few dozen elements of each parameter show what is wrong everywhere; two random projections (the inner product with an
outer product of one random vector a dimension) show what is wrong in a single place. Both are linear, so that those of
a sum over ranks are the sums of theirs: kilobytes go over the network, and nobody holds a second copy of the gradients.
"""

from __future__ import annotations

import math
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

    elements: torch.Tensor
    """float64: the sampled elements that lie in the slice."""
    projections: torch.Tensor
    """float64 [PROJECTIONS]."""
    norm: torch.Tensor
    """float64 scalar; of a sum, at most the sum of the norms."""

    def flat(self) -> torch.Tensor:
        return torch.cat([self.elements, self.projections, self.norm.reshape(1)])


class Probe:
    """Looks at one slice of a parameter: at its gradient, at its value, at parts of either."""

    def __init__(self, piece: ParameterSlice, shape: Sequence[int]) -> None:
        self.piece = piece
        self.shape = tuple(shape)
        self.slice_shape = self._cut_shape()
        self.numel = math.prod(self.slice_shape)
        draw = torch.Generator().manual_seed(zlib.crc32(str(piece).encode()))
        count = min(ELEMENTS, self.numel)
        drawn = torch.randint(0, max(1, self.numel), (count,), generator=draw)
        ends = torch.tensor([0, self.numel - 1][: self.numel], dtype=torch.int64)
        self.indices = torch.unique(torch.cat([drawn, ends]))
        """Of the sampled elements in the flattened slice, ascending."""
        self._vectors = [
            [torch.randn(size, generator=draw, dtype=torch.float64) for size in self.slice_shape]
            for _ in range(PROJECTIONS)
        ]

    @property
    def width(self) -> int:
        """Numbers in what is seen."""
        return len(self.indices) + PROJECTIONS + 1

    def read(self, flat: torch.Tensor) -> Seen:
        """The reverse of `Seen.flat`."""
        n = len(self.indices)
        return Seen(flat[:n], flat[n : n + PROJECTIONS], flat[-1])

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
        mine = self.cut(gradient)
        norm, mine = _norm(mine), _real(mine)
        elements = mine.reshape(-1)[self.indices.to(mine.device)].double().cpu()
        return Seen(elements, torch.stack([_contracted(mine, v) for v in self._vectors]), norm)

    @outside_of_autocast()
    def of_fragment(self, fragment: Fragment, gradient: torch.Tensor) -> tuple[torch.Tensor, Seen]:
        """What is kept of a part of the slice: which of the sampled elements it has, and what is seen of it."""
        which, places = self._places(fragment)
        norm, gradient = _norm(gradient), _real(gradient)
        elements = gradient.reshape(-1)[places.to(gradient.device)].double().cpu()
        projections = torch.stack([self._projected(fragment, gradient, v) for v in self._vectors])
        return which, Seen(elements, projections, norm)

    def _cut_shape(self) -> tuple[int, ...]:
        if self.piece.whole:
            return self.shape
        assert self.piece.start is not None and self.piece.stop is not None
        sizes = list(self.shape)
        sizes[self.piece.dim] = self.piece.stop - self.piece.start
        return tuple(sizes)

    def _places(self, fragment: Fragment) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the sampled elements the fragment holds, and where in its flattened memory."""
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

    def _projected(self, fragment: Fragment, gradient: torch.Tensor, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        if fragment.rows is not None:
            return _contracted(gradient, [vectors[0][fragment.rows], *vectors[1:]])
        if fragment.tensor.numel() == self.numel:
            return _contracted(gradient.reshape(self.slice_shape), vectors)
        row_elements = max(1, math.prod(self.slice_shape[1:]))
        first, last = fragment.begin // row_elements, -(-(fragment.begin + fragment.tensor.numel()) // row_elements)
        signs = vectors[0][first:last]
        for v in vectors[1:]:
            signs = signs.unsqueeze(-1) * v
        own = signs.reshape(-1)[fragment.begin - first * row_elements :][: fragment.tensor.numel()]
        return torch.dot(own.to(gradient.device), gradient.reshape(-1).double()).cpu()


def probes(groups: Sequence[Group]) -> dict[str, Probe]:
    """A probe for each member of each group, by what it is called: `weight[0:3]`."""
    return {str(m.slice): Probe(m.slice, m.parameter.spec.shape) for g in groups for m in g.members}


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _norm(t: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    norm: torch.Tensor = torch.linalg.vector_norm(parts, dtype=_wide(parts))
    return norm.double().cpu()


def _real(t: torch.Tensor) -> torch.Tensor:
    """Of complex numbers, the sum of both parts: real, and linear as all that is kept."""
    if not t.is_complex():
        return t
    parts: torch.Tensor = torch.view_as_real(t.resolve_conj())
    return parts.sum(-1)


def _contracted(t: torch.Tensor, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inner product of a tensor with the outer product of a vector a dimension."""
    found = t.to(_wide(t))
    for v in reversed(vectors):
        found = torch.matmul(found, v.to(found.device, found.dtype))
        found = found.double() if found.dim() <= 1 else found
    return found.double().cpu()
