"""Buffers of a model in training under a framework: all ranks take rank 0's, as under `DistributedDataParallel`.

What a captured model's step depends on, its program keeps alike itself. But a loop, a hook or a `training_step` may
write buffers, too, on all ranks or on rank 0 alone; and evaluation reads what training only writes. DDP broadcasts all
buffers before a forward pass that follows one whose gradients were synchronized. Here, those are broadcast that have
changed on some rank, then or before: in most models none, and ranks exchange one number for each buffer to find that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autopar.integrations.ranks import sums
from autopar.runtime.model.shared_memory import once

_KEPT_BYTES = 1 << 20
"""Of buffers up to this size a copy is kept to compare with; of larger ones, PyTorch's count of writes is looked at,
which leaves out those through `.data`."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A buffer, as it was when ranks last had the same."""

    buffer: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Seen:
        small = buffer.numel() * buffer.element_size() <= _KEPT_BYTES
        return cls(buffer, _version(buffer), buffer.detach().clone() if small else None)

    def is_still(self, buffer: torch.Tensor) -> bool:
        if self.copy is not None and self.copy.shape == buffer.shape and self.copy.dtype == buffer.dtype:
            return torch.equal(self.copy, buffer)
        return buffer is self.buffer and self.version == _version(buffer)


class SharedBuffers:
    """The buffers of a model. All ranks call its methods, together."""

    def __init__(self, model: nn.Module, *, are_alike: bool) -> None:
        """`are_alike`: whether all ranks have the same now."""
        self._model = model
        self._unchanged = {name: _Seen.of(b) for name, b in self._named().items()} if are_alike else {}
        """Buffers that no rank was found to have changed; the same ones on all ranks."""
        self._is_behind = not are_alike
        """Whether the others may have changed since ranks had the same."""

    def note_trained(self, changing: Sequence[str] = ()) -> None:
        """Behind a forward pass that trains. `changing`: names of buffers that it writes, on all ranks."""
        for name in changing:
            self._unchanged.pop(name, None)
        self._is_behind = True

    def share(self) -> None:
        """Has ranks take rank 0's values of all buffers that have changed on some rank, or did before."""
        self.share_changing()
        asked = {name: b for name, b in self._named().items() if name in self._unchanged}
        if asked:
            changed = [float(not self._unchanged[name].is_still(b)) for name, b in asked.items()]
            ranks = sums(changed, next(iter(asked.values())).device)
            found = {name: asked[name] for name, count in zip(asked, ranks, strict=True) if count}
            for name in found:
                del self._unchanged[name]
            self._take(found)

    def share_changing(self) -> None:
        """Before an evaluation: the same of those that have changed before, where the model has trained since. Ranks
        do not hear of each other here, so that rank 0 may evaluate alone and train on with the others, as with DDP."""
        if self._is_behind:
            self._is_behind = False
            self._take({name: b for name, b in self._named().items() if name not in self._unchanged})

    def _take(self, named: Mapping[str, torch.Tensor]) -> None:
        """Has ranks take rank 0's values, in one message for each kind of number."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in named.values():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(once(buffer.detach()))
        for own in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in own])
            dist.broadcast(flat, 0)
            for buffer, value in zip(own, torch.split(flat, [b.numel() for b in own]), strict=True):
                if not torch.equal(buffer, value.view(buffer.shape)):  # what is equal may be saved for a backward pass
                    buffer.copy_(value.view(buffer.shape))

    def _named(self) -> dict[str, torch.Tensor]:
        return {name: b for name, b in self._model.named_buffers() if b.layout is torch.strided}


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
