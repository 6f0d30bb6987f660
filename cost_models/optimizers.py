"""What optimizers cost: state they keep, and tensors they read and write, for each parameter element.

Counted from the update rules of `torch.optim`, fused or in place, in units of one tensor of the parameter's size and
dtype. `moved`: the parameter and the gradient read, the parameter written, and each state tensor read and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What one optimizer costs for each parameter element."""

    name: str
    state_tensors: int
    """Tensors of the parameter's size that are kept from step to step."""
    rates: tuple[tuple[str, float], ...] = ()
    """By kind of device, bytes a second that its updates were measured to read and write; others are priced from what
    the cluster, or its calibration, says of them."""

    @property
    def moved_tensors(self) -> int:
        """Tensors of the parameter's size that one update reads and writes."""
        return 3 + 2 * self.state_tensors

    def measured(self, kind: str, s_per_byte: float | None) -> OptimizerCost:
        """With the seconds that updates were measured to take, on a kind of device, for each byte of parameters."""
        return self if s_per_byte is None else replace(self, rates=((kind, self.moved_tensors / s_per_byte),))


_STATE = {
    "SGD": 0,
    "ASGD": 1,
    "Adagrad": 1,
    "Rprop": 2,
    "RMSprop": 1,
    "Adadelta": 2,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "SparseAdam": 2,
    "Adafactor": 0,
    "Muon": 1,
}

ADAMW = OptimizerCost("AdamW", 2)
"""Assumed where no optimizer is known: reads parameter, gradient and two moments, writes all but the gradient."""


def optimizer_cost(name: str, settings: Mapping[str, Any] | None = None) -> OptimizerCost:
    """The cost of a `torch.optim` class by its name, with the settings of its parameter group (`momentum`,
    `amsgrad`, `centered` add state). An optimizer that is not known costs what AdamW does."""
    settings = settings or {}
    state = _STATE.get(name, ADAMW.state_tensors)
    state += sum(bool(settings.get(key)) for key in ("amsgrad", "centered"))
    state += bool(settings.get("momentum")) and name in ("SGD", "RMSprop")
    return OptimizerCost(name, state)
