"""The parts of a cluster description, as users write them in `cluster.yaml` or in Python.

Every part can be written short where it is simple (`2 x cpu`, `25 Gbit/s`, `NVLink3`) and in full where it is not;
both mean the same object. A figure that is left out is looked up or guessed when the description is resolved.
`docs/cluster.md` lists all keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from autopar.errors import ClusterSpecError, did_you_mean
from autopar.spec import units
from autopar.spec.devices import DEVICES, DTYPES, LINKS, NETWORKS
from autopar.spec.units import Dimension, Figure

MAX_HOSTS, MAX_DEVICES = 10_000, 1_024
"""Of one entry; far beyond what can be planned, so that a slip of the keyboard is an error and not a long wait."""


def _quantity(dimension: Dimension) -> tuple[PlainValidator, PlainSerializer]:
    return (
        PlainValidator(lambda value: units.parse(value, dimension)),
        PlainSerializer(lambda figure: units.text(figure, dimension)),
    )


def _whole(most: int) -> PlainValidator:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{units.shown(value)} is not possible; expected a whole number from 1 to {most}")
        return value

    return PlainValidator(check)


def _name(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62})", value):
        return value
    hint = "" if isinstance(value, str) else "; if it is meant as text, put quotes around it"
    expected = "expected letters, digits, '-', '_' and '.', beginning with a letter or digit"
    raise ValueError(f"{units.shown(value)} is no name; {expected}{hint}")


def _kind(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._+/-]{0,62}", value):
        return value
    raise ValueError(f"{units.shown(value)} is no kind; expected a name as 'A100-80GB'")


def _check_kind(kind: str | None, library: Iterable[str], bandwidth: Figure | None) -> None:
    if kind is not None and kind not in library and bandwidth is None:
        raise ValueError(_unknown(kind, library, "its bandwidth"))


def _unknown(kind: str, library: Iterable[str], figures: str) -> str:
    hint = did_you_mean(kind, library)
    known = f"{hint} Else give" if hint else f"; it has {', '.join(library)}. Of other kinds, give"
    return f"'{kind}' is not in the library{known} {figures}"


def _yes_no(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{units.shown(value)} is neither true nor false")


def _listed(value: Any) -> Any:
    """A list, where one thing may stand for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


def _device_list(value: Any) -> Any:
    if value is None or (value == 0 and not isinstance(value, bool)):
        return ()
    if isinstance(value, int):
        raise ValueError(f"{value} does not say of what kind; write for example '{max(int(value), 1)} x cpu'")
    return _listed(value)


def _in_full(value: Any) -> bool:
    return isinstance(value, dict | BaseModel)


def _shortest(fields: dict[str, Any], words: int) -> Any:
    """One word for a mapping that says the same `words` times."""
    said = list(fields.values())
    return said[0] if len(said) == words and len(set(said)) == 1 else fields


Size = Annotated[Figure, *_quantity(units.SIZE)]
Duration = Annotated[Figure, *_quantity(units.DURATION)]
NetworkRate = Annotated[Figure, *_quantity(units.NETWORK_RATE)]
MemoryRate = Annotated[Figure, *_quantity(units.MEMORY_RATE)]
FlopRate = Annotated[Figure, *_quantity(units.FLOP_RATE)]
Name = Annotated[str, PlainValidator(_name)]
Kind = Annotated[str, PlainValidator(_kind)]
YesNo = Annotated[bool, PlainValidator(_yes_no)]


class Written(BaseModel):
    """What all parts share: they do not change, know their fields, and complain in the same words from Python."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    noun: ClassVar[str]
    """`a host`, for messages."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as e:
            from autopar.spec.cluster_problems import report

            raise ClusterSpecError(report(e, type(self))) from None

    # Pydantic's own mark for an `__init__` that only wraps: parts inside parts are validated in place, so that an
    # error names the whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class PeakFlopsSpec(Written):
    """The most FLOP/s that a device does, dense, by number format. Short: one figure for all of them."""

    noun = "peak_flops"

    float64: FlopRate | None = None
    float32: FlopRate | None = None
    bfloat16: FlopRate | None = None
    float16: FlopRate | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return data if _in_full(data) else dict.fromkeys(DTYPES, units.parse(data, units.FLOP_RATE))

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        return _shortest(full(self), len(DTYPES))


class DeviceSpec(Written):
    """Equal devices of a host, one rank on each. Short: `8 x A100-80GB`."""

    noun = "a device"

    kind: Kind
    """A name in the library, or any name where all figures are given."""
    count: Annotated[int, _whole(MAX_DEVICES)] = 1
    memory: Size | None = None
    memory_bandwidth: MemoryRate | None = None
    peak_flops: PeakFlopsSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        match = re.fullmatch(r"(?:(\d{1,9})\s*x\s+)?(\S.*)", data.strip())
        return {"kind": match[2], "count": int(match[1] or 1)} if match else {"kind": data}

    @model_validator(mode="after")
    def _known(self) -> Self:
        peak = self.peak_flops
        complete = self.memory and self.memory_bandwidth and peak and peak.float32
        if self.kind not in DEVICES and not complete:
            raise ValueError(_unknown(self.kind, DEVICES, "its memory, memory_bandwidth and peak_flops (float32)"))
        return self

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        fields = full(self)
        return f"{self.count} x {self.kind}" if fields.keys() <= {"kind", "count"} else fields


class InterconnectSpec(Written):
    """The link between the devices of one host. Short: the name of a kind, `NVLink3`."""

    noun = "an interconnect"

    kind: Kind | None = None
    bandwidth: MemoryRate | None = None
    """One direction, of one device; of all devices together where `shared`."""
    latency: Duration | None = None
    shared: YesNo | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"kind": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _known(self) -> Self:
        _check_kind(self.kind, LINKS, self.bandwidth)
        return self

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        fields = full(self)
        return self.kind if fields.keys() == {"kind"} else fields


class DuplexSpec(Written):
    """The rate of a host's network cards, all together. Short: one figure for both directions."""

    noun = "a bandwidth"

    send: NetworkRate
    receive: NetworkRate

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return data if _in_full(data) else dict.fromkeys(("send", "receive"), units.parse(data, units.NETWORK_RATE))

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        return _shortest(full(self), 2)


class HostSpec(Written):
    """A host, or `count` equal hosts, then named `name-0`, `name-1` and so on."""

    noun = "a host"

    name: Name
    count: Annotated[int, _whole(MAX_HOSTS)] = 1
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

    @model_validator(mode="before")
    @classmethod
    def _without_devices(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("serves") is None and data.get("devices", 1) in (None, 0, [], ()):
            return data | {"serves": True}
        return data

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.devices and self.serves is None:
            raise ValueError("the host has no devices; write for example 'devices: 2 x cpu', or 'serves: true'")
        if not self.devices and not self.serves:
            raise ValueError("the host has no devices and does not serve, so it is of no use; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        fields = full(self)
        devices = fields.pop("devices", [])
        if not devices:
            return fields
        # In the order in which one writes them; one kind of device needs no list.
        first = {key: fields.pop(key) for key in ("name", "count") if key in fields}
        return first | {"devices": devices[0] if len(devices) == 1 else devices} | fields

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.count == 1 else tuple(f"{self.name}-{i}" for i in range(self.count))


class SwitchSpec(Written):
    """A switch. Short: its name."""

    noun = "a switch"

    name: Name
    bandwidth: NetworkRate | None = None
    """Of one port, each direction."""
    latency: Duration | None = None
    """One way, between two hosts on it."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        fields = full(self)
        return self.name if fields.keys() == {"name"} else fields


def _pair(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2:
        return value
    raise ValueError(f"{units.shown(value)} does not name two ends; expected for example [rack-0, core]")


class LinkSpec(Written):
    """A cable between two switches, a switch and a host, or two hosts."""

    noun = "a link"

    between: Annotated[tuple[Name, Name], BeforeValidator(_pair)]
    bandwidth: NetworkRate | None = None
    """Each direction; the network's where it is left out."""
    latency: Duration | None = None
    """One way."""


class NetworkSpec(Written):
    """The network between the hosts: one switch, unless it names others. Short: the name of a kind, `25GbE`."""

    noun = "a network"

    kind: Kind | None = None
    bandwidth: NetworkRate | None = None
    """Of one port, each direction; of the hosts' cards, ports and links that do not say their own."""
    latency: Duration | None = None
    """One way, between two hosts on one switch."""
    switches: Annotated[tuple[SwitchSpec, ...], BeforeValidator(_listed)] = ()
    links: Annotated[tuple[LinkSpec, ...], BeforeValidator(_listed)] = ()

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"kind": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _known(self) -> Self:
        _check_kind(self.kind, NETWORKS, self.bandwidth)
        return self

    @model_serializer(mode="wrap")
    def _shorten(self, full: SerializerFunctionWrapHandler) -> Any:
        fields = full(self)
        return self.kind if fields.keys() == {"kind"} else fields
