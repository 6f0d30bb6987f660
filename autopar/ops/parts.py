"""What gradients are made of: counted, packed, and put together again from the parts of all ranks.

A group's flat value of parts holds the indices of all rows of tables; then, member after member, the rows, or the left
factor and the right one. Ranks may hold different numbers of rows; all send as much as the one that
holds most.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.training_graph import Parts
from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.group import Group, Member
from autopar.ops.layouts import REPLICATE, Shard
from autopar.ops.values import Bytes, Setting, Value, Work

SORT_BYTES = 8 * 24
"""Bytes that merging equal indices moves for each of them: a sort of 64-bit keys, in a dozen passes. [Empirical, of the
right order]"""
PART_KERNELS = 5
"""Kernels for each gradient whose parts are counted, packed or put together: a sort, an addition by index, copies.
[Empirical, of the right order]"""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Left and right part of one term: indices and values, or two factors."""


@dataclass(frozen=True)
class Counted:
    """One rank's rows, member by member."""

    counts: torch.Tensor
    """int64; what is sent to the other ranks."""
    indices: tuple[torch.Tensor | None, ...]
    """`rows`: the different indices, ascending."""
    places: tuple[torch.Tensor | None, ...]
    """`rows`: which of them each looked-up row belongs to."""


def count(looked_up: Sequence[Sequence[torch.Tensor] | None], rows: Sequence[int], device: torch.device) -> Counted:
    """`looked_up`: for each member made of rows, the indices of its terms; `None` for factors, whose number of rows is
    given."""
    counts: list[int] = []
    found: list[torch.Tensor | None] = []
    places: list[torch.Tensor | None] = []
    for indices, known in zip(looked_up, rows, strict=True):
        if indices is None:
            counts.append(known)
            found.append(None)
            places.append(None)
            continue
        flat = torch.cat([i.reshape(-1) for i in indices])
        different, place = torch.unique(flat, return_inverse=True)
        counts.append(different.numel())
        found.append(different)
        places.append(place)
    return Counted(torch.tensor(counts, dtype=torch.int64, device=device), tuple(found), tuple(places))


def rows_of(rows: Sequence[int], earlier: Sequence[torch.Tensor]) -> int:
    """Of a member made of factors: those of this batch's terms, and those of earlier micro-batches."""
    return sum(rows) + sum(len(e) for e in earlier)


def joined(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> Pair:
    """The terms of one gradient as one, in memory of their own."""
    if left[0].is_floating_point():
        return torch.cat(list(left)), torch.cat(list(right))
    return torch.cat([i.reshape(-1) for i in left]), torch.cat([v.reshape(-1, v.shape[-1]) for v in right])


def added(earlier: Pair, one: Pair) -> Pair:
    """The parts of a further micro-batch behind those of the earlier ones."""
    return torch.cat([earlier[0], one[0]]), torch.cat([earlier[1], one[1]])


def bag_values(values: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, mean: bool) -> torch.Tensor:
    """The gradient of each row that an embedding bag has looked up: that of its bag, divided where it is a mean."""
    ends = torch.cat([offsets[1:], offsets.new_tensor([indices.numel()])])
    sizes = (ends - offsets)[: len(values)]
    if mean:
        values = values / sizes.clamp(min=1).unsqueeze(1).to(values.dtype)
    return values.repeat_interleave(sizes, 0)


def as_integers(bits: torch.Tensor) -> torch.Tensor:
    """Elements of a flat value as the integers that their bits are."""
    return bits.view(torch.int64 if bits.dtype.itemsize == 8 else torch.int32)


def of_rows(parts: Sequence[Pair], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A sparse gradient from the rows of all ranks, equal ones added up."""
    indices, values = torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])
    found = torch.sparse_coo_tensor(indices.long().unsqueeze(0), values.to(dtype), tuple(shape), check_invariants=False)
    return found.coalesce()


class Layout:
    """Where the parts of a group's members lie in a flat value."""

    def __init__(self, members: Sequence[Member], dtype: torch.dtype) -> None:
        self.members = tuple(members)
        self.dtype = dtype
        name = str(dtype).removeprefix("torch.")
        self._index_elements = [index_elements(m.parts, name) for m in members]

    def elements(self, counts: Sequence[int]) -> int:
        """Of one rank's flat value; an even number, so that indices of 32 bits are aligned behind it, too."""
        total = sum(
            c * (m.parts.row_width + i) for c, m, i in zip(counts, self.members, self._index_elements, strict=True)
        )
        return total + total % 2

    def views(self, flat: torch.Tensor, counts: Sequence[int]) -> list[Pair]:
        """Left and right part of each member, in the memory of `flat`; indices as integers."""
        indices, offset = [], 0
        for rows, extra in zip(counts, self._index_elements, strict=True):
            # The bits of integers; a sum over ranks never touches them, they are only copied.
            bits = flat[offset : offset + rows * extra]
            indices.append(as_integers(bits))
            offset += rows * extra
        found = []
        for member, rows, index in zip(self.members, counts, indices, strict=True):
            parts, left = member.parts, index
            if parts.left_width:
                left = flat[offset : offset + rows * parts.left_width].view(rows, parts.left_width)
                offset += left.numel()
            right = flat[offset : offset + rows * parts.right_width].view(rows, parts.right_width)
            offset += right.numel()
            found.append((left, right))
        return found


def _copy_all(into: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(torch.split(into, [len(r) for r in rows])), list(rows))


class Pack(nn.Module):
    """This rank's parts as one flat value, as long as that of the rank that holds most."""

    def __init__(self, group: Group, dtype: torch.dtype, world_size: int) -> None:
        super().__init__()
        self.layout = Layout(group.members, dtype)
        self.world_size = world_size

    def forward(
        self,
        counted: Counted,
        values: Sequence[Sequence[Pair]],
        everyone: torch.Tensor,
        rank: int,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`values`: the terms of each member; `everyone`: the counts of all ranks."""
        by_rank = everyone.view(self.world_size, -1).tolist()
        longest = max(self.layout.elements(c) for c in by_rank)
        flat = torch.empty(longest, dtype=self.layout.dtype, device=everyone.device)
        for i, (left, right) in enumerate(self.layout.views(flat, by_rank[rank])):
            different, places = counted.indices[i], counted.places[i]
            terms = values[i]
            if scale is not None:
                terms = [(a, b * scale) for a, b in terms]
            if different is None or places is None:
                _copy_all(left, [a for a, _ in terms])
                _copy_all(right, [b for _, b in terms])
                continue
            left.copy_(different)
            looked_up = torch.cat([b.reshape(-1, right.shape[1]) for _, b in terms])
            merged = torch.zeros(right.shape, dtype=looked_up.dtype, device=looked_up.device)
            merged.index_add_(0, places, looked_up)
            for term in self.layout.members[i].parts.terms:
                if term.padding >= 0:
                    merged[different == term.padding] = 0
            right.copy_(merged)
        return flat


class Form(nn.Module):
    """The group's gradients from the parts of all ranks, as one tensor a member, the same on every rank."""

    def __init__(self, group: Group, dtype: torch.dtype, wire: torch.dtype, world_size: int, sparse: bool) -> None:
        super().__init__()
        self.layout = Layout(group.members, wire)
        self.dtype = dtype
        self.world_size = world_size
        self.sparse = sparse
        """Whether gradients made of rows are sparse tensors of those rows."""

    def forward(self, gathered: torch.Tensor, everyone: torch.Tensor) -> list[torch.Tensor]:
        by_rank = everyone.view(self.world_size, -1).tolist()
        flats = gathered.view(self.world_size, -1)
        views = [self.layout.views(flat, counts) for flat, counts in zip(flats, by_rank, strict=True)]
        return [self._one(member, [v[i] for v in views]) for i, member in enumerate(self.layout.members)]

    def _one(self, member: Member, parts: list[Pair]) -> torch.Tensor:
        if member.parts.kind == "factors":
            left = torch.cat([a for a, _ in parts]).to(self.dtype)
            right = torch.cat([b for _, b in parts]).to(self.dtype)
            return left.t() @ right
        if self.sparse:
            return of_rows(parts, member.shape, self.dtype)
        whole = torch.zeros(member.shape, dtype=self.dtype, device=parts[0][1].device)
        for indices, values in parts:  # one rank after the other, so that every rank adds in the same order
            whole.index_add_(0, indices.long(), values.to(self.dtype))
        return whole


@dataclass(frozen=True, slots=True)
class CountParts(Operation):
    """How many rows each gradient's parts have on this rank, once equal ones are merged; to be gathered."""

    name = "count"
    queue = "counts"
    in_place = True

    def behind(self, group: Group) -> int:
        return group.known

    def value(self, at: Emission) -> Value:
        n, members = at.world_size, len(at.group.members)
        return Value(n * members, "int64", Shard((members,) * n))

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        looked_up = sum(m.parts.rows for m in call.members if m.parts.kind == "rows")
        return Work(moved_bytes=looked_up * SORT_BYTES, kernels=PART_KERNELS * len(call.members))

    def write(self, site: Site, call: Call) -> Any:
        group = call.owner_group
        looked_up: list[list[Any] | None] = []
        rows: list[Any] = []
        for member in group.members:
            earlier = [left for left, _ in site.earlier_terms(member.slice.name)]
            if member.parts.kind == "rows":
                own = [site.computed(t.left) for t in member.parts.terms]
                looked_up.append([*earlier, *own])
                rows.append(0)
            else:
                looked_up.append(None)
                own_rows = [site.rows(t.right, int(t.right_transposed)) for t in member.parts.terms]
                rows.append(site.call(rows_of, (own_rows, earlier)))
        counted = site.notes(group)["counted"] = site.call(count, (looked_up, rows, site.device))
        return site.call(getattr, (counted, "counts"))


@dataclass(frozen=True, slots=True)
class PackParts(Operation):
    """What the group's gradients are made of on this rank, as one flat value, as many rows as the counts say; to be
    gathered. Its elements are those expected from the batch that was captured."""

    name = "parts"
    forms_gradients = True
    queue = "gradients"
    dtype: str

    def value(self, at: Emission) -> Value:
        n, own = at.world_size, self._elements(at.group)
        return Value(n * own, self.dtype, Shard((own,) * n), expected=True)

    def _elements(self, group: Group) -> int:
        return sum(m.parts.distinct * (m.parts.row_width + index_elements(m.parts, self.dtype)) for m in group.members)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        group = call.owner_group
        read = sum(m.parts.rows * m.parts.row_width for m in group.members) * DTYPE_BYTES[group.dtype]
        moved = 2 * read + self._elements(group) * DTYPE_BYTES[self.dtype]
        return Work(moved_bytes=moved, kernels=PART_KERNELS * len(group.members))

    def replaces(self, group: Group) -> Sequence[str]:
        return [name for m in group.members for name in m.parts.replaced]

    def captured_elements(self, call: Call, rank: int) -> int:
        layout = Layout(call.members, call.torch_dtype)
        return layout.elements([m.parts.distinct for m in call.members])

    def write(self, site: Site, call: Call) -> Any:
        group, dtype = call.owner_group, call.torch_dtype
        pairs = [[*site.earlier_terms(n), *site.terms_of(n)] for n in group.names]
        module = Pack(group, dtype, site.world_size)
        counted, everyone = site.notes(group)["counted"], site.value_of(call.inputs[0])
        return site.call_module(f"parts_{group.index}", module, (counted, pairs, everyone, site.rank, site.scale))


@dataclass(frozen=True, slots=True)
class FormGradients(Operation):
    """The gradients that all ranks' parts add up to; with `touched`, only the rows of tables that were looked up."""

    name = "form"
    touched: int | None = None

    def value(self, at: Emission) -> Value:
        return Value(at.group.elements, at.group.dtype, REPLICATE)

    def work(self, call: Call, rank: int, setting: Setting) -> Work:
        group, parts, n = call.owner_group, call.inputs[0], setting.world_size
        width = DTYPE_BYTES[group.dtype]
        touched = group.elements if self.touched is None else self.touched
        return Work(
            flops=sum(2 * n * m.parts.rows * m.elements for m in group.members if m.parts.kind == "factors"),
            moved_bytes=parts.elements * (DTYPE_BYTES[parts.dtype] + 2 * width) + touched * width,
            kernels=PART_KERNELS * len(group.members),
        )

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return (call.elements if self.touched is None else self.touched) * DTYPE_BYTES[call.dtype]

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        """The factors of all ranks, once more, while a product is formed of them, of one member at a time."""
        factors = [m.parts for m in call.members if m.parts.kind == "factors"]
        most = max((setting.world_size * f.rows * f.row_width for f in factors), default=0)
        return most * DTYPE_BYTES[call.dtype]

    def write(self, site: Site, call: Call) -> Any:
        group, parts, counts = call.owner_group, *call.inputs
        module = Form(group, call.torch_dtype, parts.torch_dtype, site.world_size, self.touched is not None)
        found = site.call_module(f"form_{group.index}", module, (site.value_of(parts), site.value_of(counts)))
        return [site.call(operator.getitem, (found, i)) for i in range(len(group.members))]


def touched_elements(group: Group, passes_over: Sequence[bool], world_size: int) -> int | None:
    """Elements of a group's gradients that the rows of all ranks are expected to touch, where the optimizer passes over
    the others of some members; `None` where it passes over none. All ranks must see alike whether it does, however many
    rows each of them expects."""
    each = zip(group.members, passes_over, strict=True)
    total = sum(_touched(m, world_size) if passes else m.elements for m, passes in each)
    return total if any(passes_over) else None


def _touched(member: Member, world_size: int) -> int:
    return min(member.elements, world_size * member.parts.distinct * member.parts.row_width)


def index_elements(parts: Parts, dtype: str) -> int:
    """How many elements of a flat value of this dtype hold the index of one row; factors have none."""
    return 0 if parts.kind == "factors" else index_width(dtype)


def index_width(dtype: str) -> int:
    """How many elements of this dtype hold an index, of 32 bits or more."""
    return max(1, 4 // DTYPE_BYTES[dtype])
