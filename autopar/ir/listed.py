"""Batches that list their samples, as detectors take them: a list of images, and a list with a dict, or a dataclass,
for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.ir.form import held_by, is_record, record_of


def listed(batch: Any, within: tuple[int, ...] = ()) -> int | None:
    """Samples in a batch that holds a list with a dict or a dataclass for each; `None` where it holds none. A tuple of
    these is such a list where another tuple or list of as many stands beside it; else it holds arguments. `within`: the
    dataclasses that it lies in, which are not looked into again."""
    values, within = _values(batch, within), (*within, id(batch))
    own = _own_list(values)
    if own is not None:
        return len(own)
    return next((n for v in values if not isinstance(v, list) and (n := listed(v, within)) is not None), None)


def chosen(batch: Any, size: int, rows: Sequence[int], within: tuple[int, ...] = ()) -> Any:
    """These samples of a batch that lists `size` of them. Of tensors of so many rows, these are taken, too. `within`:
    as in `listed`."""
    if isinstance(batch, torch.Tensor):
        return batch[list(rows)] if batch.dim() and len(batch) == size else batch
    values, within = _values(batch, within), (*within, id(batch))
    if not values:
        return batch
    here = _own_list(values) is not None
    parts = [
        type(v)(v[i] for i in rows) if here and _sequence(v) and len(v) == size else chosen(v, size, rows, within)
        for v in values
    ]
    return _with_parts(batch, parts)


def joined(one: Any, other: Any, within: tuple[int, ...] = ()) -> Any:
    """A batch that lists the samples of two, which list one each. Of tensors of one row, both rows are taken; what else
    they hold is the other's. `within`: as in `listed`."""
    if isinstance(other, torch.Tensor):
        return torch.cat([one, other]) if other.dim() and len(other) == 1 else other
    ones, others, within = _values(one, within), _values(other, within), (*within, id(one), id(other))
    if not others:
        return other
    here = _own_list(others) is not None
    parts = [
        type(b)([*a, *b]) if here and _sequence(b) and len(b) == 1 else joined(a, b, within)
        for a, b in zip(ones, others, strict=True)
    ]
    return _with_parts(other, parts)


def _with_parts(batch: Any, parts: Sequence[Any]) -> Any:
    if is_record(batch):
        return record_of(type(batch), dict(zip(held_by(batch), parts, strict=True)))
    return dict(zip(batch, parts, strict=True)) if isinstance(batch, Mapping) else type(batch)(parts)


def _values(batch: Any, within: tuple[int, ...]) -> tuple[Any, ...]:
    if is_record(batch):
        return () if id(batch) in within else tuple(held_by(batch).values())
    return tuple(batch.values()) if isinstance(batch, Mapping) else tuple(batch) if _sequence(batch) else ()


def _sequence(value: Any) -> bool:
    return type(value) in (tuple, list)


def _own_list(values: Sequence[Any]) -> Sequence[Any] | None:
    """The list of dicts or dataclasses among these."""
    sequences = [v for v in values if _sequence(v) and v]
    for v in sequences:
        beside = any(len(other) == len(v) for other in sequences if other is not v)
        if all(isinstance(x, Mapping) or is_record(x) for x in v) and (type(v) is list or beside):
            return v  # type: ignore[no-any-return]
    return None
