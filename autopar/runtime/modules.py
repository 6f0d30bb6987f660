"""The modules that a rewritten graph calls: what primitives do to parameters and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from autopar.runtime.collectives import all_reduce, wait
from autopar.runtime.fragments import Formed, Fragment, of_fragments, pack
from autopar.runtime.optimizer import OptimizerPart
from autopar.runtime.products import Product

Observer = Callable[[Fragment, torch.Tensor], None]


class Update(nn.Module):
    """Runs the optimizer on the fragments that this rank holds; returns them packed, to be sent, where asked to."""

    def __init__(self, part: OptimizerPart, sent_as: torch.dtype | None) -> None:
        super().__init__()
        self.part = part
        self.sent_as = sent_as
        self.observer: Observer | None = None
        """Is shown each fragment's synchronized gradient before the update; for verification."""

    def forward(
        self, gradients: torch.Tensor | Sequence[torch.Tensor | Product], clip: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """`gradients`: the flat value this rank holds, or one for each parameter."""
        parts = self.part.fragments
        views: list[Formed]
        if isinstance(gradients, torch.Tensor):
            views = [f.of(gradients).to(f.tensor.dtype) for f in parts]
        else:
            views = of_fragments(parts, gradients)
        if clip is not None and views:
            tensors = [v for v in views if isinstance(v, torch.Tensor)]
            assert len(tensors) == len(views), "gradients that are clipped are whole"
            # Out of place: with one rank, two parameters may have one and the same gradient tensor.
            views = list(torch._foreach_mul(tensors, clip.to(tensors[0].dtype)))
        if self.observer is not None:
            for fragment, view in zip(parts, views, strict=True):
                formed = view if isinstance(view, torch.Tensor) else view()
                self.observer(fragment, formed.to_dense() if formed.is_sparse else formed)
        if views:
            for fragment in parts:
                fragment.read()
            self.part.step(views)
            for fragment in parts:
                fragment.write()
        if self.sent_as is None:
            return None
        if not parts:
            return torch.empty(
                0, dtype=self.sent_as, device=gradients.device if isinstance(gradients, torch.Tensor) else None
            )
        if len(parts) == 1 and parts[0].tensor.is_contiguous():
            return parts[0].tensor.detach().view(-1)
        return pack([f.tensor.detach() for f in parts], self.sent_as)


class Store(nn.Module):
    """Writes received parameter values into the parameters."""

    def __init__(self, parts: Sequence[Fragment]) -> None:
        super().__init__()
        self.fragments = tuple(parts)

    def forward(self, flat: torch.Tensor) -> None:
        if self.fragments:
            torch._foreach_copy_([f.now() for f in self.fragments], [f.of(flat) for f in self.fragments])


class Clip(nn.Module):
    """The factor that brings the global gradient norm down to `max_norm`, as `clip_grad_norm_` computes it."""

    def __init__(self, max_norm: float, held_once: Sequence[bool], group: str | None, device: torch.device) -> None:
        super().__init__()
        self.max_norm = max_norm
        self.held_once = tuple(held_once)
        """For each value: whether every element is held by one rank only, so that norms are summed over ranks."""
        self.group = group
        self.device = device

    def forward(self, values: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> torch.Tensor:
        replicated: list[torch.Tensor] = []
        sharded: list[torch.Tensor] = []
        for value, once in zip(values, self.held_once, strict=True):
            tensors = [value] if isinstance(value, torch.Tensor) else list(value)
            (sharded if once else replicated).extend(tensors)
        total = _square_sum(replicated, self.device)
        if self.group is not None:  # on every rank, whether it holds a part or not
            total = total + wait(all_reduce(_square_sum(sharded, self.device), self.group))
        return torch.clamp(self.max_norm / (total.sqrt() + 1e-6), max=1.0)


def _square_sum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    held = [t for t in tensors if t.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    held = [torch.view_as_real(t) if t.is_complex() else t for t in held]
    wide = [t if t.dtype in (torch.float32, torch.float64) else t.float() for t in held]
    norms = torch._foreach_norm(wide)
    return torch.stack([n.double() for n in norms]).square().sum()
