"""The work of tables whose rows live on one rank each: what is asked for, found, and sent back.

Rank r of n keeps rows r, r+n, r+2n, ...; row i is row i // n of what rank i % n keeps. A message to a rank holds what
concerns it of the first lookup, then of the second, and so on; a lookup's rows are in the order of their owners, then
of their indices, so that the rows of one lookup come back as they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.ops.messages import Message
from autopar.ops.parts import Pair, of_rows
from autopar.ops.samples import uneven_micro_batches

Counts = list[list[list[int]]]
"""[rank that wants][owner][lookup]: numbers of rows."""


@dataclass(frozen=True)
class Asked:
    """The rows that this rank's lookups name, equal ones merged."""

    counts: torch.Tensor
    """int64: 1 where this is the last of the step's batches, else 0; then, by owner, the rows of each lookup."""
    rows: tuple[torch.Tensor, ...]
    """Of each lookup, the indices of its rows."""
    places: tuple[torch.Tensor, ...]
    """Of each lookup, in the shape of its indices: which of its rows they name."""


class RowShards(nn.Module):
    """A rank's rows of the tables of a group. The methods are what the operations below call, in their order."""

    def __init__(
        self, shards: Sequence[torch.Tensor], heights: Sequence[int], waves: Sequence[Sequence[int]], rank: int, n: int
    ) -> None:
        """`heights`: rows of the whole tables. `waves`: of each exchange, the table of each lookup."""
        super().__init__()
        self.shards = tuple(shards)
        self.heights = tuple(heights)
        self.waves = tuple(tuple(w) for w in waves)
        self.rank = rank
        self.n = n

    def ask(self, wave: int, indices: Sequence[torch.Tensor], is_last: bool) -> Asked:
        """Which rows this rank's lookups need."""
        rows, places, counts = [], [], []
        for table, looked_up in zip(self.waves[wave], indices, strict=True):
            different, inverse = torch.unique(looked_up, return_inverse=True)
            if len(different) and not 0 <= int(different[0]) <= int(different[-1]) < self.heights[table]:
                raise IndexError(
                    f"indices from {int(different[0])} to {int(different[-1])} are looked up in a table of "
                    f"{self.heights[table]} rows"
                )
            owner = different % self.n
            order = torch.argsort(owner, stable=True)
            rows.append(different[order])
            places.append(torch.argsort(order)[inverse])
            counts.append(torch.bincount(owner, minlength=self.n))
        last = torch.tensor([int(is_last)], device=indices[0].device)
        return Asked(torch.cat([last, torch.stack(counts, 1).view(-1)]), tuple(rows), tuple(places))

    def agreed(self, everyone: torch.Tensor) -> Counts:
        """What all ranks want of all, from the counts that they have sent."""
        last = everyone.view(self.n, -1)[:, 0]
        if last.min() != last.max():
            raise uneven_micro_batches("a table whose rows are")
        counts: Counts = everyone.view(self.n, -1)[:, 1:].reshape(self.n, self.n, -1).tolist()
        return counts

    def wanted(self, asked: Asked, counts: Counts) -> Message:
        """To each owner, which of its rows this rank wants."""
        wanted, wanting = counts[self.rank], self._wanting(counts)
        return self._message([r // self.n for r in asked.rows], wanted), _sums(wanted), _sums(wanting)

    def found(self, wave: int, wanted: torch.Tensor, counts: Counts, dtype: torch.dtype) -> Message:
        """To each rank, the rows that it wants of this one's."""
        parts = [self.shards[t][rows].view(-1) for t, rows in self._asked_here(wave, wanted, counts)]
        own, others = self._elements(wave, counts)
        return torch.cat(parts).to(dtype), others, own

    def received(self, wave: int, found: torch.Tensor, counts: Counts) -> list[torch.Tensor]:
        """Of each lookup, its rows."""
        by_entry = zip(*self._chunks(wave, found, counts[self.rank]), strict=True)
        return [
            torch.cat(chunks).to(self.shards[t].dtype) for t, chunks in zip(self.waves[wave], by_entry, strict=True)
        ]

    def returned(
        self,
        wave: int,
        asked: Asked,
        counts: Counts,
        values: Sequence[Sequence[torch.Tensor]],
        padding: Sequence[Sequence[int]],
        dtype: torch.dtype,
        scale: torch.Tensor | None = None,
    ) -> Message:
        """To each owner, the gradients of its rows. `values`: of each lookup, the gradients of what was looked up, of
        one backward node after the other; `padding`: for each of these, the index that gets none."""
        merged = []
        for table, rows, places, found, pads in zip(
            self.waves[wave], asked.rows, asked.places, values, padding, strict=True
        ):
            total = self.shards[table].new_zeros(len(rows), self.shards[table].shape[1])
            for value, pad in zip(found, pads, strict=True):
                one = torch.zeros_like(total).index_add_(0, places.view(-1), value.reshape(-1, total.shape[1]))
                total += one if pad < 0 else one.masked_fill_((rows == pad).unsqueeze(1), 0)
            merged.append(total if scale is None else total * scale)
        own, others = self._elements(wave, counts)
        return self._message(merged, counts[self.rank]).to(dtype), own, others

    def gradient(
        self,
        waves: Sequence[tuple[int, Counts, torch.Tensor, torch.Tensor]],
        heads: Sequence[torch.Tensor] | None,
        sparse: bool,
    ) -> list[torch.Tensor]:
        """The gradients of this rank's rows, in the order of the group's members: of each exchange how many rows and
        which ones were wanted, and what was sent back, added to what a head has for them.

        `sparse`: as sparse tensors of the rows that somebody looked up.
        """
        parts: list[list[Pair]] = [[] for _ in self.shards]
        for wave, counts, wanted, values in waves:
            chunks = (c for of_rank in self._chunks(wave, values, self._wanting(counts)) for c in of_rank)
            for (table, rows), value in zip(self._asked_here(wave, wanted, counts), chunks, strict=True):
                parts[table].append((rows, value.to(self.shards[table].dtype)))
        if sparse:
            return [of_rows(found, s.shape, s.dtype) for s, found in zip(self.shards, parts, strict=True)]
        totals = [torch.zeros_like(s) for s in self.shards] if heads is None else list(heads)
        for total, found in zip(totals, parts, strict=True):
            for rows, value in found:  # one rank after the other
                total.index_add_(0, rows, value)
        return totals

    def _wanting(self, counts: Counts) -> list[list[int]]:
        """[rank][lookup]: how many of this rank's rows it wants."""
        return [of_rank[self.rank] for of_rank in counts]

    def _message(self, of_lookups: Sequence[torch.Tensor], counts: list[list[int]]) -> torch.Tensor:
        """What concerns each rank, of one lookup after the other, as one flat value. `counts`: [rank][lookup]."""
        cut = [torch.split(v, list(c)) for v, c in zip(of_lookups, zip(*counts, strict=True), strict=True)]
        return torch.cat([part.reshape(-1) for of_rank in zip(*cut, strict=True) for part in of_rank])

    def _elements(self, wave: int, counts: Counts) -> tuple[list[int], list[int]]:
        """By rank: elements of its rows that this rank wants, and of this rank's rows that it wants."""
        widths = [self.shards[t].shape[1] for t in self.waves[wave]]
        own, others = (
            [sum(c * w for c, w in zip(of_rank, widths, strict=True)) for of_rank in side]
            for side in (counts[self.rank], self._wanting(counts))
        )
        return own, others

    def _chunks(self, wave: int, flat: torch.Tensor, counts: list[list[int]]) -> list[list[torch.Tensor]]:
        """[rank][lookup]: its rows, out of a message."""
        found: list[list[torch.Tensor]] = []
        offset = 0
        for of_rank in counts:
            found.append([])
            for table, count in zip(self.waves[wave], of_rank, strict=True):
                width = self.shards[table].shape[1]
                found[-1].append(flat[offset : offset + count * width].view(count, width))
                offset += count * width
        return found

    def _asked_here(self, wave: int, wanted: torch.Tensor, counts: Counts) -> Iterator[tuple[int, torch.Tensor]]:
        """Table, and which of this rank's rows are wanted, by one rank's lookups after the other's."""
        offset = 0
        for of_rank in self._wanting(counts):
            for table, count in zip(self.waves[wave], of_rank, strict=True):
                yield table, wanted[offset : offset + count]
                offset += count


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(c) for c in counts]
