"""How often a group has synchronized, for what is drawn at random: the same on all ranks, and after a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.ops.base import Call, Emission, Operation, Site
from autopar.ops.group import Group
from autopar.ops.values import Bytes, Setting, Value

STEP_COUNT = "step_count"
"""What the state is called."""


@dataclass(frozen=True, slots=True)
class CountSteps(Operation):
    """Adds one to a state, its input, which is its value."""

    name = "count_steps"
    reads_members = False

    def behind(self, group: Group) -> int:
        return -1

    def value(self, at: Emission) -> Value:
        return at.inputs[0].made

    def allocates(self, call: Call, setting: Setting) -> Bytes | None:
        return None

    def write(self, site: Site, call: Call) -> Any:
        return site.call(count, (site.value_of(call.inputs[0]),))


def count(steps: torch.Tensor) -> torch.Tensor:
    """Counts one more, in place."""
    return steps.add_(1)


def generator_of(steps: torch.Tensor, stream: int, device: torch.device) -> torch.Generator:
    """Draws what is drawn in this step. `stream`: ranks and groups that are to draw other numbers have others."""
    # The multiplier is that of SplitMix64: seeds that are near each other lie far apart.
    mixed = (int(steps) * 0x9E3779B97F4A7C15 + stream * 0xBF58476D1CE4E5B9) % 2**63
    return torch.Generator(device).manual_seed(mixed)
