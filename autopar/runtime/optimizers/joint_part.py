"""Several optimizers over some fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.ops.fragments import Formed, Fragment
from autopar.runtime.model.copies import all_of
from autopar.runtime.optimizers.joint_optimizer import JointOptimizer, of_parameter
from autopar.runtime.optimizers.optimizer import OptimizerPart
from autopar.runtime.optimizers.own_settings import OwnSettings


class JointPart:
    """Several optimizers over some fragments: each is updated by the optimizer that holds its parameter."""

    def __init__(
        self,
        optimizer: JointOptimizer,
        parts: Sequence[Fragment],
        parameters: dict[str, nn.Parameter],
        unused: Callable[[], frozenset[str]] = frozenset,
        own: Mapping[Optimizer, OwnSettings] | None = None,
    ) -> None:
        """`unused`, and `own` by optimizer: as of `OptimizerPart`."""
        self.fragments = tuple(parts)
        holders = [of_parameter(optimizer, parameters[f.name]) for f in parts]
        self._places = [[i for i, h in enumerate(holders) if h is one] for one in optimizer.each]
        self._parts = [
            OptimizerPart(one, [parts[i] for i in places], parameters, unused, None if own is None else own[one])
            for one, places in zip(optimizer.each, self._places, strict=True)
        ]
        self._at: dict[int, tuple[OptimizerPart, int]] = {}
        """Of each fragment, its part and its place there."""
        for part, places in zip(self._parts, self._places, strict=True):
            self._at |= {i: (part, place) for place, i in enumerate(places)}

    @property
    def each(self) -> list[tuple[OptimizerPart, int]]:
        """Of each fragment, its part and its place there."""
        return [self._at[i] for i in range(len(self.fragments))]

    def step(self, gradients: Sequence[Formed]) -> None:
        """Updates the fragments, as `OptimizerPart` does."""
        for part, places in zip(self._parts, self._places, strict=True):
            if places:
                part.step([gradients[i] for i in places])

    def state(self) -> list[tuple[Fragment, dict[str, Any]]]:
        """The optimizer state of each fragment."""
        each = {part: part.state() for part in self._parts}
        return [each[part][place] for part, place in self.each]

    def settings(self) -> list[Mapping[str, Any]]:
        """Of each fragment: those of its parameter group, as they are now."""
        each = {part: part.settings() for part in self._parts}
        return [each[part][place] for part, place in self.each]

    def step_frozen(self, momenta: Sequence[torch.Tensor]) -> None:
        """Updates the fragments, as `OptimizerPart` does."""
        for part, places in zip(self._parts, self._places, strict=True):
            part.step_frozen([momenta[i] for i in places])

    def kept_state(self) -> Callable[[], None]:
        """Keeps the state as it is; what is returned puts it back."""
        return all_of([part.kept_state() for part in self._parts])

    def load_state(self, index: int, state: dict[str, Any]) -> None:
        """Sets the optimizer state of one fragment."""
        part, place = self._at[index]
        part.load_state(place, state)


Part = OptimizerPart | JointPart


def part_of(
    optimizer: Optimizer,
    parts: Sequence[Fragment],
    parameters: dict[str, nn.Parameter],
    unused: Callable[[], frozenset[str]] = frozenset,
    own: Mapping[Optimizer, OwnSettings] | None = None,
) -> Part:
    """The optimizer, or each of several, over some fragments."""
    if isinstance(optimizer, JointOptimizer):
        return JointPart(optimizer, parts, parameters, unused, own)
    return OptimizerPart(optimizer, parts, parameters, unused, None if own is None else own[optimizer])
