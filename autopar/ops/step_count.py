"""How often a group has synchronized, for what is drawn at random: the same on all ranks, and after a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.ops.base import Call, Operation, Site

STEP_COUNT = "step_count"
"""What the state is called."""


@dataclass(frozen=True, slots=True)
class CountSteps(Operation):
    """Adds one to a state, its input, which is its value."""

    name = "count_steps"
    reads_members = False
    in_place = True
    needs_only_inputs = True

    def write(self, site: Site, call: Call) -> Any:
        return site.call(count, (site.value_of(call.inputs[0]),))


def count(steps: torch.Tensor) -> torch.Tensor:
    """Counts one more, in place."""
    return steps.add_(1)


def generator_of(steps: torch.Tensor, stream: int, device: torch.device) -> torch.Generator:
    """Draws what is drawn in this step. `stream`: ranks and groups that are to draw other numbers have others."""
    # SplitMix64 (Steele, Lea and Flood, 2014): seeds that are near each other lie far apart, also in their lower half,
    # which is all that a generator on a CPU takes.
    mixed = (int(steps) * 0x9E3779B97F4A7C15 + stream * 0xD1342543DE82EF95) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return torch.Generator(device).manual_seed((mixed ^ mixed >> 31) % 2**63)
