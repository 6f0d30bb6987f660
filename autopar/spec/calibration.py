"""What a cluster was measured to do: how long collectives take, what its devices reach.

Written by `autopar calibrate`, read by the cost model in place of data sheets and guesses. Sizes are in bytes, times
in seconds, rates in bytes or operations per second.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from autopar.errors import SpecError
from autopar.spec.cluster import ClusterFingerprint
from autopar.spec.json_file import JsonFile, Record

SCHEMA_VERSION: Final = 1

Collective = Literal["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]


Seconds = Annotated[float, Field(ge=1e-12, le=1e9)]
Rate = Annotated[float, Field(ge=1e-3, le=1e30)]
"""Bytes or operations per second."""
Times = Annotated[float, Field(ge=1e-6, le=1e6)]
"""A time, in multiples of another time."""


class CollectiveTimes(Record):
    """Measured times of one collective of float32 values, at several sizes."""

    kind: Collective
    teams: tuple[tuple[int, ...], ...] = ()
    """Disjoint sets of ranks, each of which ran the collective by itself, all at the same time; empty: all ranks ran it
    together."""
    size_bytes: tuple[Annotated[int, Field(ge=1, le=2**53)], ...] = Field(min_length=1)
    """Bytes of the whole value, over all ranks of a team; ascending."""
    seconds: tuple[Seconds, ...]
    """By size, the median of the seconds until the last rank had its result."""
    processor_s: tuple[Annotated[float, Field(ge=0, le=1e9)], ...]
    """By size, the processor time in seconds that a rank's process spent on the collective, on average."""
    core_wait_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Seconds that a collective of any size takes longer where all ranks compute all the while, on average: its threads
    wait for cores that are busy."""

    @model_validator(mode="after")
    def _one_of_each(self) -> CollectiveTimes:
        if not len(self.size_bytes) == len(self.seconds) == len(self.processor_s):
            raise ValueError(f"{self.kind}: expected as many times as sizes, {len(self.size_bytes)}")
        if list(self.size_bytes) != sorted(set(self.size_bytes)):
            raise ValueError(f"{self.kind}: sizes must ascend")
        if self.teams and self.kind in ("reduce", "broadcast"):
            raise ValueError(f"{self.kind}: it has an owner, and is measured among all ranks")
        return self

    def check(self, world_size: int) -> None:
        """Raises `SpecError` unless the teams, where there are any, share out a cluster's ranks."""
        ranks = sorted(rank for team in self.teams for rank in team)
        if self.teams and (not all(self.teams) or ranks != list(range(world_size))):
            raise SpecError(f"{self.kind}: its teams do not hold each of the ranks 0 to {world_size - 1} once")


class LinkTimes(Record):
    """Measured bandwidth and latency from one rank to another, with nothing beside."""

    sender: int = Field(ge=0)
    receiver: int = Field(ge=0)
    bytes_per_s: Rate
    """Bytes a second of a large message."""
    latency_s: float = Field(ge=0, le=1e9)
    """Seconds of a message of a few bytes: half of there and back."""


class DeviceRates(Record):
    """Measured rates of one kind of device."""

    kind: str
    flops_per_s: dict[str, Rate]
    """By number format, the FLOP/s of large matrix products."""
    bytes_per_s: Rate
    """Bytes a second, read and written, in copies of large values."""
    update_bytes_per_s: Rate
    """Bytes a second, read and written, in an optimizer's fused update."""
    start_s: Seconds
    """Seconds from the start of one small operation to that of the next."""


class Calibration(JsonFile):
    """What one cluster was measured to do: collectives, links and devices."""

    VERSION: ClassVar[int] = SCHEMA_VERSION
    noun: ClassVar[str] = "calibration"
    COMMAND: ClassVar[str] = "autopar calibrate"

    schema_version: Literal[1] = SCHEMA_VERSION
    date: str
    """The date of the measurement, in UTC."""
    hardware: str
    """The hardware of rank 0's host, in words."""
    versions: dict[str, str]
    cluster: ClusterFingerprint
    backend: str
    collectives: tuple[CollectiveTimes, ...] = ()
    links: tuple[LinkTimes, ...] = ()
    devices: tuple[DeviceRates, ...] = ()
    two_at_once: Times | None = None
    """Time of two large all-reduces of one process group at the same time, in multiples of the time of one."""
    compute_beside: Times | None = None
    """Time of compute beside a large all-reduce, in multiples of its time alone."""
    compute_at_once: Times | None = None
    """Time of a rank's compute while all ranks compute, in multiples of its time while the others wait: 1 where no two
    ranks share cores; `None` where ranks compute on devices of their own."""
    took_s: float = 0.0

    def check(self) -> None:
        self.cluster.check()
        n = self.cluster.world_size
        for times in self.collectives:
            times.check(n)
        for link in self.links:
            if link.sender == link.receiver or max(link.sender, link.receiver) >= n:
                raise SpecError(f"a link from rank {link.sender} to rank {link.receiver}: the cluster has {n} ranks")

    def check_cluster(self, cluster: ClusterFingerprint) -> None:
        """Raises `SpecError` unless the calibration was taken on this cluster, whatever its links are said to reach."""
        if self.cluster.digest != cluster.digest:
            lines = cluster.cluster.difference(self.cluster.cluster) if self.cluster.spec and cluster.spec else []
            more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
            differs = f" ({'; '.join(lines[:5])}{more})" if lines else ""
            raise SpecError(
                f"the calibration was taken on another cluster: {self.cluster.summary}, this one is "
                f"{cluster.summary}{differs}. Calibrate this one with `autopar calibrate`"
            )
