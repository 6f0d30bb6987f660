"""The parts of a cluster description, as users write them in `cluster.yaml` or in Python.

A figure that is left out is looked up or guessed when the description is resolved. `docs/cluster.md` lists all keys.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from autopar.spec import units
from autopar.spec.devices import DEVICES, LINKS, NETWORKS
from autopar.spec.written import (
    Duration,
    FlopRate,
    Kind,
    MemoryRate,
    Name,
    NetworkRate,
    OneFigure,
    Size,
    Written,
    YesNo,
    check_kind,
    listed,
    whole,
)

MAX_HOSTS, MAX_DEVICES = 10_000, 1_024
"""Of one entry; far beyond what can be planned, so that a slip of the keyboard is an error and not a long wait."""


MAX_BATCH = 2**31
"""Samples on one rank."""


class PeakFlopsSpec(OneFigure):
    """The most FLOP/s that a device does, dense, by number format. Short: one figure for all of them."""

    noun = "peak_flops"
    dimension = units.FLOP_RATE

    float64: FlopRate | None = None
    float32: FlopRate | None = None
    bfloat16: FlopRate | None = None
    float16: FlopRate | None = None


class DeviceSpec(Written):
    """Equal devices of a host, one rank on each. Short: `8 x A100-80GB`."""

    kind: Kind
    """A name in the library, or any name where all figures are given; a processor's begins with `cpu`."""
    count: Annotated[int, whole(MAX_DEVICES)] = 1
    memory: Size | None = None
    memory_bandwidth: MemoryRate | None = None
    peak_flops: PeakFlopsSpec | None = None
    batch: Annotated[int, whole(MAX_BATCH)] | None = None
    """Samples in the batch of each rank on it; as many as in the example where it is left out."""

    @classmethod
    def lengthen(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        match = re.fullmatch(r"(?:(\d{1,9})\s*x\s+)?(\S.*)", data.strip())
        return {"kind": match[2], "count": int(match[1] or 1)} if match else {"kind": data}

    @classmethod
    def shorten(cls, fields: dict[str, Any]) -> Any:
        return f"{fields.get('count', 1)} x {fields['kind']}" if fields.keys() <= {"kind", "count"} else fields

    @model_validator(mode="after")
    def _known(self) -> Self:
        peak = self.peak_flops
        complete = self.memory and self.memory_bandwidth and peak and peak.float32
        check_kind(self.kind, DEVICES, complete, "its memory, memory_bandwidth and peak_flops (float32)")
        return self


class InterconnectSpec(Written):
    """The link between the devices of one host. Short: the name of a kind, `NVLink3`."""

    short = "kind"

    kind: Kind | None = None
    bandwidth: MemoryRate | None = None
    """One direction, of one device; of all devices together where `shared`."""
    latency: Duration | None = None
    shared: YesNo | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_kind(self.kind, LINKS, self.bandwidth)
        return self


class DuplexSpec(OneFigure):
    """The rate of a host's network cards, all together. Short: one figure for both directions."""

    noun = "bandwidth"
    dimension = units.NETWORK_RATE

    send: NetworkRate
    receive: NetworkRate


def _device_list(value: Any) -> Any:
    if value is None or (value == 0 and not isinstance(value, bool)):
        return ()
    if isinstance(value, int):
        raise ValueError(f"{value} does not say of what kind; write for example '{max(int(value), 1)} x cpu'")
    return listed(value)


class HostSpec(Written):
    """A host, or `count` equal hosts, then named `name-0`, `name-1` and so on."""

    name: Name
    count: Annotated[int, whole(MAX_HOSTS)] = 1
    devices: Annotated[tuple[DeviceSpec, ...], BeforeValidator(_device_list)] = ()
    interconnect: InterconnectSpec | None = None
    bandwidth: DuplexSpec | None = None
    """Of all its network cards together; the network's where it is left out."""
    switch: Name | None = None
    """The switch that it is plugged into, where the network names several."""
    serves: YesNo | None = None
    """Whether it may hold parameters and update them for others; true for a host without devices."""
    memory: Size | None = None
    memory_bandwidth: MemoryRate | None = None

    @classmethod
    def lengthen(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("serves") is None and data.get("devices", 1) in (None, 0, [], ()):
            return data | {"serves": True}
        return data

    @classmethod
    def shorten(cls, fields: dict[str, Any]) -> Any:
        devices = fields.pop("devices", [])
        if not devices:
            return fields
        # In the order in which one writes them; one kind of device needs no list.
        first = {key: fields.pop(key) for key in ("name", "count") if key in fields}
        return first | {"devices": devices[0] if len(devices) == 1 else devices} | fields

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.devices and self.serves is None:
            raise ValueError("the host has no devices; write for example 'devices: 2 x cpu', or 'serves: true'")
        if not self.devices and not self.serves:
            raise ValueError("the host has no devices and does not serve, so it is of no use; leave it out")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.count == 1 else tuple(f"{self.name}-{i}" for i in range(self.count))


class SwitchSpec(Written):
    """A switch. Short: its name."""

    short = "name"

    name: Name
    bandwidth: NetworkRate | None = None
    """Of one port, each direction."""
    latency: Duration | None = None
    """One way, between two hosts on it."""


def _pair(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2:
        return value
    raise ValueError(f"{units.shown(value)} does not name two ends; expected for example [rack-0, core]")


class LinkSpec(Written):
    """A cable between two switches, a switch and a host, or two hosts."""

    between: Annotated[tuple[Name, Name], BeforeValidator(_pair)]
    bandwidth: NetworkRate | None = None
    """Each direction; the network's where it is left out."""
    latency: Duration | None = None
    """One way."""


class NetworkSpec(Written):
    """The network between the hosts: one switch, unless it names others. Short: the name of a kind, `25GbE`."""

    short = "kind"

    kind: Kind | None = None
    bandwidth: NetworkRate | None = None
    """Of one port, each direction; of the hosts' cards, ports and links that do not say their own."""
    latency: Duration | None = None
    """One way, between two hosts on one switch."""
    switches: Annotated[tuple[SwitchSpec, ...], BeforeValidator(listed)] = ()
    links: Annotated[tuple[LinkSpec, ...], BeforeValidator(listed)] = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_kind(self.kind, NETWORKS, self.bandwidth)
        return self


class ClusterParts(Written):
    """A cluster as written: `ClusterSpec`, before it is known whether its parts fit together."""

    noun = "cluster"

    hosts: tuple[HostSpec, ...]
    network: NetworkSpec = NetworkSpec()
