"""Looking at what a step computes: at gradients before a lossy group encodes them, delays them, or keeps them to their
rank, and at those that the optimizer updates with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx
from torch import nn

from autopar.ops.fragments import Fragment
from autopar.ops.updates import Observer, Step


class Look(nn.Module):
    """Returns a rank's gradients as they are; shows each of them to an observer, times `factor`."""

    def __init__(self, parts: Sequence[Fragment], factor: float) -> None:
        super().__init__()
        self.fragments = tuple(parts)
        self.factor = factor
        self.observer: Observer | None = None

    def forward(self, value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        if self.observer is not None:
            for i, fragment in enumerate(self.fragments):
                self.observer(fragment, self.factor * (value[i] if isinstance(value, list) else fragment.of(value)))
        return value


@dataclass
class Observers:
    """Who is shown the gradients of a program's graphs."""

    users: Observer | None = None
    """Of what the optimizer updates with."""
    updates: Observer | None = None
    """The proof's, of the same where that is the global mean's gradient."""
    own: Observer | None = None
    """The proof's, of a rank's own gradients elsewhere."""
    elsewhere: Observer | None = None
    """The proof's, of what the optimizer updates with there, before it is clipped."""

    def watch(self, graph: torch.fx.GraphModule) -> None:
        """Has the modules of a graph show them."""
        looked = {_group(name) for name, m in graph.named_children() if isinstance(m, Look)}
        for name, m in graph.named_children():
            if isinstance(m, Look):
                m.observer = self.own
            elif isinstance(m, Step):
                is_looked = _group(name) in looked
                m.observer = self.users if is_looked else self._both()
                m.unclipped = self.elsewhere if is_looked else None

    def _both(self) -> Observer | None:
        if self.users is None or self.updates is None:
            return self.users or self.updates
        first, second = self.updates, self.users

        def both(fragment: Fragment, gradient: torch.Tensor) -> None:
            first(fragment, gradient)
            second(fragment, gradient)

        return both


def _group(name: str) -> str:
    """The number of a module's group, with which its name ends."""
    return name.rpartition("_")[2]
