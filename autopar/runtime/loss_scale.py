"""The factor that a loss is multiplied with so that small gradients survive float16; `torch.amp.GradScaler` keeps it.

The backward pass of each rank starts from its share of the global batch, times the scale, times the number of ranks: so
on even ranks local gradients are as large as under `DistributedDataParallel`. What is synchronized is scaled back where
it is updated with, by all ranks alike; where it holds infinities or NaN, no rank updates, and the scale is lowered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler

from autopar.errors import PlanError, SpecError
from autopar.ops.context import Context
from autopar.spec.plan import Fidelity, Plan
from autopar.strategies.lowering import fidelity_of

LossScaling = Literal["dynamic"] | GradScaler


class LossScale:
    """The scale of a program's loss, kept in a `GradScaler`, the user's own where one was given."""

    def __init__(self, scaler: GradScaler, world_size: int) -> None:
        self.scaler = scaler
        self._world_size = world_size
        self.skipped = False
        """Whether the gradients of the step that was run last held infinities or NaN."""

    @property
    def factor(self) -> float:
        """What synchronized gradients are multiplied with."""
        return float(self.scaler.get_scale()) * self._world_size

    def seen(self, is_finite: bool) -> None:
        """Takes note of whether a step's gradients are finite."""
        self.skipped = not is_finite

    def update(self) -> None:
        """Lowers the scale behind a step that was skipped; raises it behind so many in succession that were not."""
        state = self.state()
        scale, since = state["scale"], int(state["_growth_tracker"]) + 1
        if self.skipped:
            scale, since = scale * state["backoff_factor"], 0
        elif since == state["growth_interval"]:
            grown = scale * state["growth_factor"]
            scale, since = grown if math.isfinite(torch.tensor(grown, dtype=torch.float32)) else scale, 0
        self.load({**state, "scale": scale, "_growth_tracker": since})

    def state(self) -> dict[str, Any]:
        """In PyTorch's own form."""
        return self.scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Takes a state in PyTorch's own form."""
        self.scaler.load_state_dict(state)

    def lower(self, factor: float) -> None:
        """Multiplies the scale with a factor."""
        state = self.state()
        self.load({**state, "scale": state["scale"] * factor})


class Scaled(nn.Module):
    """Multiplies what a backward pass starts from with the scale, as it is when the step runs."""

    def __init__(self, scale: LossScale, by_ranks: bool) -> None:
        """`by_ranks`: also with the number of ranks."""
        super().__init__()
        self._scale = scale
        self._by_ranks = by_ranks

    def forward(self, seed: torch.Tensor) -> torch.Tensor:
        factor = self._scale.factor if self._by_ranks else float(self._scale.scaler.get_scale())
        return seed * factor


def scaler_of(given: object) -> GradScaler | None:
    """What keeps the scale, from what `loss_scale` was given as; `None` where nothing is scaled. Raises `SpecError`."""
    if given is None:
        return None
    if given == "dynamic":
        return GradScaler("cpu")  # only keeps numbers, which are read on the host
    if isinstance(given, GradScaler):
        return given if given.is_enabled() else None
    raise SpecError(f"loss_scale is {given!r}, expected 'dynamic', a torch.amp.GradScaler, or None")


UNKEPT: tuple[Fidelity, ...] = ("exact", "rounded")
"""Of plans under which a loss may be scaled: nothing of a step is kept for later ones."""


def check_scaled(parameters: Mapping[str, nn.Parameter], plan: Plan, context: Context) -> None:
    """Raises `SpecError` where a parameter's gradient is too narrow to be scaled back, and `PlanError` where a group of
    the plan would keep infinities, or gradients of another scale, for later steps."""
    kept = fidelity_of(plan.groups, context)
    if kept not in UNKEPT:
        raise PlanError(
            f"loss_scale: plan '{plan.name}' has groups that are '{kept}': they keep gradients of a step for later "
            "ones, which have another scale, or let each rank update alone, where all ranks must skip a step together. "
            "Use a plan that is exact or rounded, or bfloat16, which needs no scale"
        )
    narrow = [n for n, p in parameters.items() if p.requires_grad and p.dtype is torch.float16]
    if narrow:
        raise SpecError(
            f"loss_scale: parameter '{narrow[0]}' is float16, in which a gradient cannot be scaled back: keep the "
            "parameters in float32 and run program.step under torch.autocast, as torch.amp.GradScaler asks for, too"
        )
