"""What a plan takes of the memory of its fullest rank's device, and what that is taken by."""

from __future__ import annotations

from pydantic import Field

from autopar.formatting import size
from autopar.spec.json_file import Record


class MemoryUse(Record):
    """Predicted bytes of the rank with the least to spare, at the moment of the step at which it holds most."""

    rank: int
    device: str
    """The device's kind: `A100-80GB`."""
    device_bytes: int = Field(gt=0)
    """The memory that it has."""
    reserve_bytes: int
    """What of it was to be kept free."""
    parameters_bytes: int
    gradients_bytes: int
    """Complete ones, and those that are packed to be sent."""
    optimizer_bytes: int
    """The optimizer's state."""
    activations_bytes: int
    """What the passes hold on their way: activations, and gradients of them."""
    communication_bytes: int
    """Buffers of collectives."""
    other_bytes: int
    """The model's buffers, the batch, and what strategies keep from step to step."""

    @property
    def peak_bytes(self) -> int:
        """The sum of the parts."""
        return sum(value for _, value in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """What the peak is made of, by name."""
        return (
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("activations", self.activations_bytes),
            ("communication buffers", self.communication_bytes),
            ("batch and other buffers", self.other_bytes),
        )

    @property
    def over_bytes(self) -> int:
        """By how much the peak exceeds the device's memory; 0 where it fits."""
        return max(0, self.peak_bytes - self.device_bytes)

    @property
    def short_bytes(self) -> int:
        """By how much less is left free than was to be kept free; 0 where that much is free."""
        return max(0, self.peak_bytes - (self.device_bytes - self.reserve_bytes))

    @property
    def device_text(self) -> str:
        """The rank and its device: `rank 0 (A100-80GB, 80.0 GiB)`."""
        return f"rank {self.rank} ({self.device}, {size(self.device_bytes)})"

    @property
    def parts_text(self) -> str:
        """The parts that count, the largest first: `optimizer state 59.8 GiB, parameters 29.9 GiB`."""
        there = sorted((p for p in self.parts if 1000 * p[1] > self.peak_bytes), key=lambda p: -p[1])
        return ", ".join(f"{name} {size(value)}" for name, value in there)

    @property
    def text(self) -> str:
        """A sentence or two for people."""
        left = self.device_bytes - self.peak_bytes
        if self.over_bytes:
            spare = f"{size(self.over_bytes)} more than the device has"
        elif self.short_bytes:
            spare = f"which leaves {size(left)} free, where {size(self.reserve_bytes)} were to be kept free"
        else:
            kept = f"; {size(self.reserve_bytes)} of it are kept free in any case" if self.reserve_bytes else ""
            spare = f"which leaves {size(left)} free{kept}"
        return (
            f"Memory at its fullest: {size(self.peak_bytes)} of {size(self.device_bytes)} on rank {self.rank} "
            f"({self.device}), {spare}. It is taken by {self.parts_text}."
        )
