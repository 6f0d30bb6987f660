"""Half a power iteration on each of several matrices: what each rank makes of its matrix, and what the sum is good for.

One of a matrix's two factors is given, orthonormal and the same on all ranks; the other one is the product of the
matrix with it, and is summed over ranks. Next time they change places, so that two steps are one power iteration on the
sum (Vogels, Karimireddy and Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning", 2020,
arXiv 2008.01425, Algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import nn

START_SEED = 2008_01425
"""Of the matrix that factors begin with; any number does."""
START_SHARE = 1e-4
"""How much of the start matrix is added to a factor, relative to its largest element, before it is orthonormalised: a
column that is empty, or depends on the others, becomes one that no gradient is orthogonal to. That is far above the
rounding of float32, so that rounding does not choose a column, and far below what changes an approximation."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A member of a group, viewed as a matrix: dimension 0 against all others."""

    start: int
    """Where its elements begin in the group's flat value."""
    rows: int
    columns: int
    odd: bool
    """Whether its left factor is given, and its right one summed, in even turns; else that is so in odd turns."""

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def gives_left(self, turn: int) -> bool:
        """Whether the left factor, `rows` long, is given in this turn."""
        return (turn % 2 == 1) != self.odd

    def given(self, turn: int) -> int:
        """How long the columns of the given factor are."""
        return self.rows if self.gives_left(turn) else self.columns

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """[rows, columns]: its elements of the group's flat value."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Factor:
    """Where a matrix's factor begins among all factors of a turn, and how long its columns are."""

    matrix: Matrix
    start: int
    length: int

    def of(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """[rank, length], a column in each row, for BLAS is quicker so: its elements."""
        return flat[self.start : self.start + rank * self.length].view(rank, self.length)


@dataclass(frozen=True)
class Matrices:
    """Which members of a group are approximated, and where everything lies. What is summed in a turn lies as what is
    given in the next one; behind the factors are the members that are sent whole."""

    rank: int
    approximated: tuple[Matrix, ...]
    whole: tuple[tuple[int, int], ...]
    """Where the other members begin and end in the group's flat value."""
    factors: tuple[tuple[Factor, ...], tuple[Factor, ...]]
    """Those that are given in even and in odd turns: equally long ones follow one another."""

    @property
    def factor_elements(self) -> int:
        """Of all factors, in the turn in which they are larger; the other turn's are padded."""
        return max(map(self.used_elements, (0, 1)))

    @property
    def approximated_elements(self) -> int:
        return sum(m.stop - m.start for m in self.approximated)

    @property
    def whole_elements(self) -> int:
        return sum(stop - start for start, stop in self.whole)

    def used_elements(self, turn: int) -> int:
        """Of the factors that are given in this turn."""
        return self.rank * sum(f.length for f in self.factors[turn % 2])

    def alike(self, turn: int) -> Iterator[tuple[int, int, int]]:
        """Of the factors given in this turn, those of one length: where they begin, how many they are, and how long."""
        for length, some in groupby(self.factors[turn % 2], lambda f: f.length):
            found = [*some]
            yield found[0].start, len(found), length


@lru_cache(maxsize=256)
def matrices(shapes: tuple[tuple[int, ...], ...], rank: int, min_compression: float) -> Matrices:
    """Of members of these shapes: a member is approximated where its larger factor has at most 1/`min_compression` of
    its elements. Which of its factors comes first is chosen so that about as much is sent in all turns."""
    found, whole, start = list[Matrix](), list[tuple[int, int]](), 0
    for shape in shapes:
        stop = start + math.prod(shape)
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if rows * columns and min_compression * rank <= min(rows, columns):
            found.append(Matrix(start, rows, columns, odd=False))
        elif stop > start:
            whole.append((start, stop))
        start = stop
    approximated = _balanced(found)
    return Matrices(rank, approximated, tuple(whole), (_placed(approximated, rank, 0), _placed(approximated, rank, 1)))


def _balanced(found: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """The same, where the longest differences between two factors are shared out between turns (greedy partition)."""
    more, chosen = 0, dict[int, Matrix]()
    for m in sorted(found, key=lambda m: (-abs(m.rows - m.columns), m.start)):
        difference = m.columns - m.rows  # given in even turns rather than in odd ones
        odd = abs(more - difference) < abs(more + difference)
        more += -difference if odd else difference
        chosen[m.start] = Matrix(m.start, m.rows, m.columns, odd)
    return tuple(chosen[m.start] for m in found)


def _placed(approximated: Sequence[Matrix], rank: int, turn: int) -> tuple[Factor, ...]:
    start, factors = 0, list[Factor]()
    for m in sorted(approximated, key=lambda m: (m.given(turn), m.start)):
        factors.append(Factor(m, start, m.given(turn)))
        start += rank * m.given(turn)
    return tuple(factors)


def start_matrix(length: int, rank: int) -> torch.Tensor:
    """float64 [length, rank], between -1 and 1: the first rows of one matrix, whatever the length. It is the same on
    all ranks and in every process, and PyTorch's own generator is left alone."""
    draw = torch.Generator().manual_seed(START_SEED)
    return 2 * torch.rand(length, rank, generator=draw, dtype=torch.float64) - 1


def orthonormal(factors: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[..., rank, length]: orthonormal rows that span nearly what the factors' rows do, and something wherever these
    are zero, as Gram and Schmidt find them. They are equal for equal input, on machines of one kind. What is not finite
    comes out as NaN. `start`: [rank, length]."""
    tiny = torch.finfo(factors.dtype).tiny
    scaled = factors / factors.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    scaled += START_SHARE * start
    if scaled.shape[-2] == 1:
        return F.normalize(scaled, dim=-1, eps=0.0)
    q, r = torch.linalg.qr(scaled.mT)
    found: torch.Tensor = q.mT * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1, 1).unsqueeze(-1)  # signs vary
    return found


class PowerIteration(nn.Module):
    """What a rank does in a step for one sync group, with tensors that live from step to step: its residual, the
    factors that are given, and the number of turns."""

    def __init__(self, of: Matrices, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: in which all is computed, sent and kept."""
        super().__init__()
        self.of = of
        longest = max(f.length for factors in of.factors for f in factors)
        self._start = start_matrix(longest, of.rank).t().contiguous().to(device, dtype)
        self._turn, self._version = 0, -1

    def encode(
        self, gradient: torch.Tensor, residual: torch.Tensor, factors: torch.Tensor, turns: torch.Tensor
    ) -> torch.Tensor:
        """This rank's part of the factors that are summed, and behind them the members that are sent whole. The
        gradient is added to the residual, and the product of own factors is taken off. Given factors become
        orthonormal."""
        of, turn = self.of, self._turn_of(turns)
        residual += gradient
        self._orthonormalise(factors, turn)
        sent = residual.new_empty(of.factor_elements + of.whole_elements)
        sent[of.used_elements(turn + 1) : of.factor_elements].zero_()
        for matrix, given, made in self._sides(factors, sent, turn):
            own, from_left = matrix.of(residual), matrix.gives_left(turn)
            torch.mm(given, own if from_left else own.t(), out=made)
            left, right = (given, made) if from_left else (made, given)
            torch.addmm(own, left.t(), right, alpha=-1, out=own)
        rest = [residual[start:stop] for start, stop in of.whole]
        if rest:
            torch._foreach_copy_(self._whole(sent), rest)
            torch._foreach_zero_(rest)
        return sent

    def decode(
        self, summed: torch.Tensor, factors: torch.Tensor, turns: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The group's flat value in a dtype, from the sum over ranks of what `encode` returned. The summed
        factors are given next time."""
        of, turn = self.of, self._turn_of(turns)
        found = summed.new_empty(of.approximated_elements + of.whole_elements, dtype=dtype)
        for matrix, given, made in self._sides(factors, summed, turn):
            left, right = (given, made) if matrix.gives_left(turn) else (made, given)
            if found.dtype == summed.dtype:
                torch.mm(left.t(), right, out=matrix.of(found))
            else:
                matrix.of(found).copy_(torch.mm(left.t(), right))
        if of.whole:
            torch._foreach_copy_([found[start:stop] for start, stop in of.whole], self._whole(summed))
        factors.copy_(summed[: of.factor_elements])
        turns += 1
        self._turn, self._version = turn + 1, turns._version
        return found

    def _turn_of(self, turns: torch.Tensor) -> int:
        """The number of turns so far. A device is asked for it only where somebody else has written it: a checkpoint
        was loaded, say, or a batch of another shape has another graph."""
        if turns._version != self._version:
            self._turn, self._version = int(turns.item()), turns._version
        return self._turn

    def _orthonormalise(self, factors: torch.Tensor, turn: int) -> None:
        rank = self.of.rank
        for start, count, length in self.of.alike(turn):
            some = factors[start : start + count * length * rank].view(count, rank, length)
            some.copy_(orthonormal(some, self._start[:, :length]))

    def _sides(
        self, given: torch.Tensor, summed: torch.Tensor, turn: int
    ) -> Iterator[tuple[Matrix, torch.Tensor, torch.Tensor]]:
        """Of each matrix, the factor that is given, and the one that is summed."""
        of = self.of
        there = {f.matrix.start: f.of(summed, of.rank) for f in of.factors[(turn + 1) % 2]}
        for f in of.factors[turn % 2]:
            yield f.matrix, f.of(given, of.rank), there[f.matrix.start]

    def _whole(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """Of what is sent, the members that are sent whole."""
        return list(torch.split(sent[self.of.factor_elements :], [stop - start for start, stop in self.of.whole]))
