"""What a verification finds, and how large a difference rounding explains.

A step in a narrow dtype rounds thousands of times, and ranks round otherwise than one process: each rounds its own sum
over its own samples. So a difference is compared with the largest value of what it is in, and, where that is small
itself, with the rounding of what it was computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from autopar.errors import VerificationError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1.2e-1}
"""Largest difference, relative to the largest value of a gradient, or to how far a parameter or buffer has moved. Below
it lie 1,700 roundings in float32, 20 in float16 and 15 in bfloat16. [Empirical: five steps of SGD with momentum]"""
ROUNDED_TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
"""For gradients with 16 bits on the wire: each is rounded once, and each partial sum once (unit roundoff 2^-9, 2^-12;
a ring of up to 8 ranks)."""
ROUNDINGS = {torch.float16: 4, torch.bfloat16: 4}
"""Roundings of the model's largest gradient that a gradient may differ by, however small it is itself: that of a bias
in front of a batch normalization, or of a key's in attention, is a sum of large values, and zero but for them. 16 bits
are summed in 32, so few are made."""
_MANY = 256
"""The same in wider dtypes, which are summed in themselves."""
SENSITIVITY = 4
"""How many times as far as one rounding of its parameters moves a training, another order of its sums may move it."""


@dataclass(frozen=True)
class StepDifference:
    """The largest differences after one step, over all ranks."""

    step: int
    loss: float
    gradient: float
    parameter: float
    buffer: float
    """Of floating-point buffers, as of parameters; of others, which must be equal, the difference itself."""
    worst: str
    """The parameter or buffer whose value, or whose gradient, differs most."""

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.parameter, self.buffer)


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    world_size: int
    dtype: str
    """What the model was converted to; "own" where it was left as it was built."""
    computed_in: str
    """The coarsest dtype that the model computes in, from which the tolerance follows."""
    tolerance: float
    steps: tuple[StepDifference, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(s.largest <= self.tolerance for s in self.steps)

    def raise_if_failed(self) -> None:
        """Raises `VerificationError` with the first step that differs."""
        for s in self.steps:
            if not s.largest <= self.tolerance:
                raise VerificationError(
                    f"step {s.step}: the distributed program differs from one process by {s.loss:.2e} in the loss, "
                    f"{s.gradient:.2e} in gradients, {s.parameter:.2e} in parameters and {s.buffer:.2e} in buffers "
                    f"(most in '{s.worst}'); allowed {self.tolerance:.2e} in {self.computed_in}"
                )


def worst_of(rows: Iterable[StepDifference]) -> StepDifference:
    """One step's largest differences over several ranks."""
    rows = list(rows)
    most = max(rows, key=lambda r: max(r.gradient, r.parameter, r.buffer))
    return StepDifference(
        most.step,
        max(r.loss for r in rows),
        max(r.gradient for r in rows),
        max(r.parameter for r in rows),
        max(r.buffer for r in rows),
        most.worst,
    )


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The floating-point dtype that rounds most."""
    return max((d for d in dtypes if d.is_floating_point), key=lambda d: torch.finfo(d).eps, default=torch.float64)


@dataclass(frozen=True)
class Measure:
    """How differences are measured: in parts of what may differ, so that all are compared with one tolerance."""

    tolerance: float
    dtype: torch.dtype
    """The coarsest that the model computes in, or that gradients have on the wire."""

    @property
    def _noise(self) -> float:
        return ROUNDINGS.get(self.dtype, _MANY) * _eps(self.dtype)

    def gradient(self, mine: torch.Tensor, reference: torch.Tensor, largest: float, moves: float) -> float:
        """`largest`: element of any gradient of the model. `moves`: how far rounding moves the reference itself."""
        noise = max(self._noise * largest, SENSITIVITY * moves)
        return self._relative(mine, reference, _size(reference), noise)

    def value(
        self,
        mine: torch.Tensor,
        reference: torch.Tensor,
        start: torch.Tensor,
        steps: int,
        farthest: float,
        moves: float,
    ) -> float:
        """Of a parameter or a buffer that has been updated `steps` times since it was `start`.

        `farthest`: how far any parameter of the model has moved. Each update also rounds the value to its own dtype.
        """
        stored = steps * _eps(reference.dtype) * _size(reference)
        noise = max(self._noise * farthest, stored, SENSITIVITY * moves)
        return self._relative(mine, reference, distance(reference, start), noise)

    def loss(self, mine: torch.Tensor, reference: torch.Tensor) -> float:
        """Relative to the loss, or to 1."""
        return self._relative(mine, reference, max(1.0, _size(reference)), 0.0)

    def _relative(self, mine: torch.Tensor, reference: torch.Tensor, size: float, noise: float) -> float:
        off = distance(mine, reference)
        if off == 0:
            return 0.0
        scale = max(size, noise / self.tolerance)
        found = off / scale if scale else float("inf")
        return found if found == found else float("inf")


def buffer_difference(
    measure: Measure, mine: torch.Tensor, reference: torch.Tensor, start: torch.Tensor, steps: int, moves: float
) -> float:
    """As of a value; NaN and infinity are equal to themselves. Other than floating-point numbers must be equal."""
    if mine.shape != reference.shape or mine.dtype != reference.dtype:
        return float("inf")
    a, b = wide(mine), wide(reference)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if bool(same.all()):
        return 0.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return distance(mine, reference)
    if not bool((torch.isfinite(b) | same).all()):
        return float("inf")
    begun = start.shape == reference.shape
    start = torch.where(torch.isfinite(start), start, 0) if begun else torch.zeros_like(reference)
    finite = torch.isfinite(b)
    return measure.value(mine[finite], reference[finite], start[finite], steps, 0.0, moves)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two elements."""
    return float((wide(a) - wide(b)).abs().max()) if b.numel() else 0.0


def wide(t: torch.Tensor) -> torch.Tensor:
    """The values in float64, or complex128."""
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def largest_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The largest element of all gradients."""
    return max((_size(g) for g in gradients.values()), default=0.0)


def _size(t: torch.Tensor) -> float:
    return float(wide(t).abs().max()) if t.numel() else 0.0


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
