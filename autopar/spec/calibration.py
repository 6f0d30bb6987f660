"""What a cluster was measured to do: how long collectives take, what its devices reach.

Written by `autopar calibrate`, read by the cost model in place of data sheets and guesses. Sizes are in bytes, times
in seconds, rates in bytes or operations per second.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field, model_validator

from autopar.errors import SpecError
from autopar.spec.plan import ClusterFingerprint
from autopar.spec.stored import Record, Stored

SCHEMA_VERSION: Final = 1

Collective = Literal["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]


class CollectiveTimes(Record):
    """One collective of float32 values, at several sizes."""

    kind: Collective
    teams: tuple[tuple[int, ...], ...] = ()
    """Disjoint sets of ranks that did it at the same time, each among itself; empty for one of all ranks."""
    size_bytes: tuple[int, ...] = Field(min_length=1)
    """Of the whole value, over all ranks of a team; ascending."""
    seconds: tuple[float, ...]
    """Until the last rank had its result: medians."""
    processor_s: tuple[float, ...]
    """Processor time that a rank's process spent on it, on average."""

    @model_validator(mode="after")
    def _one_of_each(self) -> CollectiveTimes:
        if not len(self.size_bytes) == len(self.seconds) == len(self.processor_s):
            raise ValueError(f"{self.kind}: expected as many times as sizes, {len(self.size_bytes)}")
        if list(self.size_bytes) != sorted(set(self.size_bytes)) or min(self.size_bytes) <= 0:
            raise ValueError(f"{self.kind}: sizes must be greater than 0 and ascend")
        if min(self.seconds) <= 0:
            raise ValueError(f"{self.kind}: times must be greater than 0")
        return self


class LinkTimes(Record):
    """From one rank to another, by itself."""

    sender: int
    receiver: int
    bytes_per_s: float = Field(gt=0)
    """Of a large message."""
    latency_s: float = Field(ge=0)
    """Of a message of a few bytes: half of there and back."""


class DeviceRates(Record):
    """What one kind of device reaches."""

    kind: str
    flops_per_s: dict[str, float]
    """In large matrix products, by number format."""
    bytes_per_s: float = Field(gt=0)
    """Read and written, in copies of large values."""
    update_bytes_per_s: float = Field(gt=0)
    """Read and written, in an optimizer's fused update."""
    start_s: float = Field(gt=0)
    """From one small operation to the next."""


class Calibration(Stored):
    """Of one cluster."""

    VERSION: ClassVar[int] = SCHEMA_VERSION
    WHAT: ClassVar[str] = "calibration"
    COMMAND: ClassVar[str] = "autopar calibrate"

    schema_version: Literal[1] = SCHEMA_VERSION
    date: str
    """When, in UTC."""
    hardware: str
    """Of rank 0's host."""
    versions: dict[str, str]
    cluster: ClusterFingerprint
    backend: str
    collectives: tuple[CollectiveTimes, ...] = ()
    links: tuple[LinkTimes, ...] = ()
    devices: tuple[DeviceRates, ...] = ()
    two_at_once: float | None = None
    """Two large all-reduces of one process group at the same time, in multiples of one."""
    compute_beside: float | None = None
    """Compute beside a large all-reduce, in multiples of what it takes alone."""
    took_s: float = 0.0

    def check_cluster(self, cluster: ClusterFingerprint) -> None:
        """Raises `SpecError` unless it was taken on this cluster, whatever its links are said to reach."""
        if self.cluster.digest != cluster.digest:
            raise SpecError(
                f"the calibration was taken on another cluster: {self.cluster.summary}, this one is "
                f"{cluster.summary}. Calibrate this one with `autopar calibrate`"
            )
