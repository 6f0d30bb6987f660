"""A cluster with every host, device and cable by itself and no figure missing: what planning works on.

`ClusterSpec` holds what the user wrote; `cluster_resolve` makes these of it. Quantities are in base units, and each is
a `Figure` that knows whether it was measured, looked up or guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.spec.devices import LinkKind, PeakFlops
from autopar.spec.units import Figure


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on."""

    kind: str
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    peak_flops: PeakFlops
    host_link: LinkKind
    """To the host's memory and network card."""
    batch: int | None = None
    """Samples in the batch of its rank; `None`: as many as in the example that is planned for."""

    def flops_per_s(self, dtype: str = "float32") -> Figure:
        """The peak rate in a number format, as torch prints it without the prefix."""
        return self.peak_flops.of(dtype)


@dataclass(frozen=True, slots=True)
class Host:
    """One host."""

    name: str
    devices: tuple[Device, ...]
    interconnect: LinkKind
    """Between the devices of the host."""
    serves: bool
    """Whether it may hold parameters and apply updates for others."""
    memory_bytes: Figure
    """Of the host itself, for what it serves."""
    memory_bytes_per_s: Figure
    cable: Cable | None
    """To its switch; None for a host by itself, or one that only `links` join to others."""

    @property
    def send_bytes_per_s(self) -> float | None:
        return self.cable.forth_bytes_per_s.value if self.cable else None

    @property
    def receive_bytes_per_s(self) -> float | None:
        return self.cable.back_bytes_per_s.value if self.cable else None


@dataclass(frozen=True, slots=True)
class Cable:
    """A full-duplex connection in the network; its ends are names of hosts and switches."""

    one: str
    other: str
    forth_bytes_per_s: Figure
    """From `one` to `other`."""
    back_bytes_per_s: Figure
    latency_s: Figure
    """One way, and what its ends add to it."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    host: Host
    local_rank: int
    """Among the ranks of its host; the index of its device."""
    device: Device
