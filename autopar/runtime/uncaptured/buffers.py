"""The buffers of a model that runs eagerly: which of them a step has changed, and how ranks take rank 0's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from autopar.backends.collectives import may_fail
from autopar.errors import CaptureError
from autopar.runtime.job.process_group import Group, take_from_rank_0
from autopar.runtime.model.tables import table_of

_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
_MOST_DIMENSIONS = 16


class EagerBuffers:
    """A model's buffers, those that hold nothing among them; those of batch normalization left out, which nothing
    reads in training. Buffers that a model registers later are each rank's own."""

    def __init__(self, owners: Mapping[str, nn.Module], group: Group) -> None:
        """`owners`: modules, by what the names of their buffers begin with."""
        self._group = group
        modules = {m: start + path for start, owner in owners.items() for path, m in owner.named_modules()}
        tables = [(table_of(m._buffers), path) for m, path in modules.items() if not isinstance(m, _NormBase)]
        self._held: list[tuple[dict[str, torch.Tensor | None], str]] = [(t, key) for t, _ in tables for key in t]
        self._names = [f"{path}.{key}" if path else key for t, path in tables for key in t]
        self._before: list[tuple[torch.Tensor | None, int]] = []
        self._changed: Sequence[bool] = ()
        self._replaced: Sequence[bool] = ()

    def begin(self) -> None:
        """Notes what there is before a step. What the step replaces is held meanwhile: another tensor could get its
        place in memory."""
        self._before = [(b, 0 if b is None else b._version) for b in self._now()]
        self._changed = self._replaced = ()

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return bool(self._held)

    def changes(self) -> list[bool]:
        """Of each buffer whether it was written to since, then of each whether it is another tensor."""
        now = self._now()
        changed = [
            b is old and b is not None and b._version != v for b, (old, v) in zip(now, self._before, strict=True)
        ]
        return [*changed, *(b is not old for b, (old, _) in zip(now, self._before, strict=True))]

    def written(self) -> list[str]:
        """Names of the buffers that the step has changed on this rank. What has replaced a buffer and fits it is
        written into the tensor that was there, as a graph does; raises `CaptureError` where it does not fit."""
        found: list[str] = []
        now = self._now()
        replaced = [b is not old for b, (old, _) in zip(now, self._before, strict=True)]
        # Several may take each other's places: all are read before one is written to.
        several = sum(replaced) > 1
        made = [b.clone() if several and new and b is not None else b for b, new in zip(now, replaced, strict=True)]
        each = zip(self._held, self._names, self._before, now, made, strict=True)
        for (table, key), name, (old, version), is_now, new in each:
            if is_now is old:
                found += [name] if old is not None and old._version != version else []
                continue
            if old is None or new is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                raise CaptureError(f"the model replaces its buffer '{name}' by one that does not fit in its place")
            with torch.no_grad():
                old.copy_(new)
            table[key] = old
            found.append(name)
        return found

    def settle(self, anywhere: Sequence[bool]) -> None:
        """Is given what `changes` has returned, as it is on any rank."""
        self._changed, self._replaced = anywhere[: len(self._held)], anywhere[len(self._held) :]

    def share(self, what: str) -> None:
        """Gives all ranks rank 0's values of what has changed on any. A tensor that was replaced may have another shape
        on each rank: where it does not fit rank 0's, it is replaced again."""
        if self._group.pg is None:
            return
        found = []
        for held, changed, replaced in zip(self._held, self._changed, self._replaced, strict=False):
            table, key = held
            if replaced:
                table[key] = self._like_rank_0(table.get(key), what)
            buffer = table.get(key)
            if (changed or replaced) and buffer is not None:
                found.append(buffer)
        take_from_rank_0(found, self._group, what)

    def _like_rank_0(self, mine: torch.Tensor | None, what: str) -> torch.Tensor | None:
        device = self._device()
        told = torch.full((3 + _MOST_DIMENSIONS,), -1, dtype=torch.int64)
        if mine is not None:
            of_dtype = _DTYPES.index(mine.dtype)
            told[: 3 + mine.dim()] = torch.tensor([1, of_dtype, mine.dim(), *mine.shape])
        told = told.to(device)
        with self._group.guard(what), may_fail():
            dist.broadcast(told, group_src=0, group=self._group.pg)
        there, of_dtype, dims, *shape = told.tolist()
        if there != 1:
            return None
        dtype, shape = _DTYPES[of_dtype], shape[:dims]
        if mine is not None and mine.dtype == dtype and [*mine.shape] == shape:
            return mine
        return torch.empty(shape, dtype=dtype, device=device if mine is None else mine.device)

    def _device(self) -> torch.device:
        return next((b.device for b in self._now() if b is not None), torch.device("cpu"))

    def _now(self) -> list[torch.Tensor | None]:
        return [table.get(key) for table, key in self._held]
