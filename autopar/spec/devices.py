"""A library of devices, links within a host, and networks: what to assume of a thing that is only named.

Figures of products are looked up: each entry names its source. Peak FLOP/s are dense (no sparsity) and those that
PyTorch uses by default: float32 is plain float32, not TF32; float16 and bfloat16 are those of the matrix units, with
float32 accumulation. Rates of links are for one direction; datasheets often print the sum of both. Memory is printed
in GB by the makers and built in GiB; driver and error correction take a few per cent of it. Datasheets have no
latencies: those between GPUs are what NCCL assumes of a step of its ring (`src/graph/tuning.cc`, protocol Simple),
the others are guesses. What is guessed says so, and a calibration replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.spec.units import Figure, guess

GIB = 1 << 30
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """The most FLOP/s that a device does, by number format."""

    float64: Figure
    float32: Figure
    bfloat16: Figure
    float16: Figure

    def of(self, dtype: str) -> Figure:
        """Of a format as torch prints it, without the prefix; for one that is not listed, float32's, as a guess."""
        return getattr(self, dtype) if dtype in DTYPES else guess(self.float32.value)


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A link within a host."""

    name: str
    bytes_per_s: Figure
    """One direction, of one device; of all devices together where `shared`."""
    latency_s: Figure
    """One way, from device to device."""
    shared: bool
    """Whether all devices of a host share one such link (a bus), or have one each into a switch."""
    source: str


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What one rank computes on."""

    name: str
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    peak_flops: PeakFlops
    interconnect: str
    """The link to the host's other devices, a key of `LINKS`."""
    host_link: str
    """The link to the host's memory and network card, a key of `LINKS`."""
    source: str
    products: tuple[str, ...] = ()
    """What the driver calls it, without the maker's name."""


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """A network between hosts: one port of it."""

    name: str
    bytes_per_s: Figure
    latency_s: Figure
    """One way, from host to host through one switch."""
    source: str


def _link(name: str, gb_per_s: float, latency_s: Figure, source: str) -> LinkKind:
    return LinkKind(name, Figure(gb_per_s * 1e9), latency_s, shared=False, source=source)


_NCCL_NVLINK, _NCCL_PCI, _NCCL_NET = Figure(3.4e-6), Figure(5.7e-6), Figure(14e-6)
_PCI_SIG = "PCI Express base specification: transfer rate x 16 lanes x 128/130"
_LINKS = (
    LinkKind("loopback", guess(2e9), guess(30e-6), True, "TCP within one host, through the kernel's memory copies"),
    LinkKind("memory", guess(10e9), guess(0.0), False, "a CPU rank's own memory: a copy into the socket's buffer"),
    _link("PCIe3", 15.754, _NCCL_PCI, _PCI_SIG),
    _link("PCIe4", 31.508, _NCCL_PCI, _PCI_SIG),
    _link("PCIe5", 63.015, _NCCL_PCI, _PCI_SIG),
    _link("NVLink2", 150, _NCCL_NVLINK, "NVIDIA V100 datasheet: 300 GB/s, both directions"),
    _link("NVLink3", 300, _NCCL_NVLINK, "NVIDIA A100 datasheet: 600 GB/s, both directions"),
    _link("NVLink4", 450, _NCCL_NVLINK, "NVIDIA H100 datasheet: 900 GB/s, both directions"),
    _link("NVLink5", 900, _NCCL_NVLINK, "NVIDIA HGX B200 datasheet: 1.8 TB/s, both directions"),
    _link("InfinityFabric4", 448, guess(4e-6), "AMD Instinct MI300X data sheet: 7 links x 128 GB/s, both directions"),
)
LINKS: dict[str, LinkKind] = {k.name: k for k in _LINKS}


def _gpu(
    name: str,
    gib: float,
    gb_per_s: float,
    tflops: tuple[float | None, float, float | None, float],
    links: str,
    source: str,
    product: str,
) -> DeviceKind:
    """`tflops` in the order of `DTYPES`. None: the source is silent. Then float64 runs at 1/64 of float32, as on
    graphics cards, and bfloat16 as fast as float32, as on devices whose matrix units lack it; both as guesses."""
    float64, float32, bfloat16, float16 = tflops
    peak_flops = PeakFlops(
        float64=guess(float32 / 64 * 1e12) if float64 is None else Figure(float64 * 1e12),
        float32=Figure(float32 * 1e12),
        bfloat16=guess(float32 * 1e12) if bfloat16 is None else Figure(bfloat16 * 1e12),
        float16=Figure(float16 * 1e12),
    )
    interconnect, host_link = links.split()
    memory_bytes, memory_bytes_per_s = Figure(gib * GIB), Figure(gb_per_s * 1e9)
    return DeviceKind(
        name, memory_bytes, memory_bytes_per_s, peak_flops, interconnect, host_link, source, products=(product,)
    )


def _guessed(name: str, gib: float, gb_per_s: float, flops: tuple[float, float, float], links: str) -> DeviceKind:
    """`flops` of float64, float32, and the two short formats."""
    float64, float32, short = map(guess, flops)
    peak_flops = PeakFlops(float64, float32, short, short)
    interconnect, host_link = links.split()
    return DeviceKind(
        name, guess(gib * GIB), guess(gb_per_s * 1e9), peak_flops, interconnect, host_link, "a guess: calibrate"
    )


CORE_FLOPS = 80e9
"""float32 FLOP/s of a CPU core: 2.5 GHz x 2 units x 8 lanes x 2 (multiply and add), as AVX2 has it. A guess."""

_V100 = "NVIDIA V100 datasheet, SXM2"
_T4 = "NVIDIA T4 product brief"
_A100 = "NVIDIA A100 datasheet"
_HALVED = "; matrix figures halved, as it prints them with sparsity"
_L4, _L40S = "NVIDIA L4 datasheet" + _HALVED, "NVIDIA L40S datasheet"
_H100, _H200 = "NVIDIA H100 datasheet" + _HALVED, "NVIDIA H200 datasheet" + _HALVED
_B200 = "NVIDIA Blackwell architecture brief, HGX B200" + _HALVED
_GA102, _ADA = "NVIDIA Ampere GA102 whitepaper", "NVIDIA Ada GPU architecture whitepaper"
_MI300X = "AMD Instinct MI300X data sheet"

_DEVICES = (
    # A CPU rank is taken for four cores of a server with their share of its memory, a GPU for a mid-range card.
    _guessed("cpu", 8, 10, (2 * CORE_FLOPS, 4 * CORE_FLOPS, 4 * CORE_FLOPS), "loopback memory"),
    _guessed("gpu", 16, 500, (0.25e12, 15e12, 60e12), "PCIe4 PCIe4"),
    # name, GiB, GB/s, TFLOP/s in the order of DTYPES, links to devices and to the host, source, the driver's name
    _gpu("V100-16GB", 16, 900, (7.8, 15.7, None, 125), "NVLink2 PCIe3", _V100, "V100-SXM2-16GB"),
    _gpu("V100-32GB", 32, 900, (7.8, 15.7, None, 125), "NVLink2 PCIe3", _V100, "V100-SXM2-32GB"),
    _gpu("T4", 16, 320, (None, 8.1, None, 65), "PCIe3 PCIe3", _T4, "T4"),
    _gpu("A10", 24, 600, (None, 31.2, 125, 125), "PCIe4 PCIe4", "NVIDIA A10 datasheet", "A10"),
    _gpu("A30", 24, 933, (5.2, 10.3, 165, 165), "PCIe4 PCIe4", "NVIDIA A30 datasheet", "A30"),
    _gpu("A100-40GB", 40, 1555, (9.7, 19.5, 312, 312), "NVLink3 PCIe4", _A100, "A100-SXM4-40GB"),
    _gpu("A100-80GB", 80, 2039, (9.7, 19.5, 312, 312), "NVLink3 PCIe4", _A100, "A100-SXM4-80GB"),
    _gpu("A100-80GB-PCIe", 80, 1935, (9.7, 19.5, 312, 312), "PCIe4 PCIe4", _A100, "A100 80GB PCIe"),
    _gpu("L4", 24, 300, (None, 30.3, 121, 121), "PCIe4 PCIe4", _L4, "L4"),
    _gpu("L40S", 48, 864, (None, 91.6, 362, 362), "PCIe4 PCIe4", _L40S, "L40S"),
    _gpu("H100-80GB", 80, 3350, (34, 67, 989, 989), "NVLink4 PCIe5", _H100, "H100 80GB HBM3"),
    _gpu("H100-80GB-PCIe", 80, 2000, (26, 51, 756, 756), "PCIe5 PCIe5", _H100, "H100 PCIe"),
    _gpu("H200-141GB", 141, 4800, (34, 67, 989, 989), "NVLink4 PCIe5", _H200, "H200"),
    _gpu("B200-180GB", 180, 8000, (40, 80, 2250, 2250), "NVLink5 PCIe5", _B200, "B200"),
    _gpu("RTX-3090", 24, 936, (None, 35.6, 71, 71), "PCIe4 PCIe4", _GA102, "GeForce RTX 3090"),
    _gpu("RTX-4090", 24, 1008, (None, 82.6, 165.2, 165.2), "PCIe4 PCIe4", _ADA, "GeForce RTX 4090"),
    _gpu("RTX-A6000", 48, 768, (None, 38.7, 154.8, 154.8), "PCIe4 PCIe4", _GA102, "RTX A6000"),
    _gpu("MI300X", 192, 5300, (81.7, 163.4, 1307.4, 1307.4), "InfinityFabric4 PCIe5", _MI300X, "AMD Instinct MI300X"),
)
DEVICES: dict[str, DeviceKind] = {k.name: k for k in _DEVICES}


def like(kind: str) -> DeviceKind:
    """The library's entry for a kind of device. For a name that it does not have: that of any processor, where the name
    begins with `cpu`, or else of any GPU."""
    return DEVICES.get(kind) or DEVICES["cpu" if kind.lower().startswith("cpu") else "gpu"]


GUESSED_LATENCY = guess(30e-6)
"""One way between two hosts, where nothing says better: TCP over Ethernet."""


def _network(name: str, gbit_per_s: float, latency_s: Figure, source: str) -> NetworkKind:
    return NetworkKind(name, Figure(gbit_per_s * 1e9 / 8), latency_s, source)


_ETHERNET, _IBTA = "IEEE 802.3, line rate", "InfiniBand Trade Association, 4 lanes"
_NETWORKS = (
    *(_network(f"{rate}GbE", rate, GUESSED_LATENCY, _ETHERNET) for rate in (1, 10, 25, 40, 50, 100, 200, 400)),
    _network("InfiniBand-EDR", 100, _NCCL_NET, _IBTA),
    _network("InfiniBand-HDR", 200, _NCCL_NET, _IBTA),
    _network("InfiniBand-NDR", 400, _NCCL_NET, _IBTA),
)
NETWORKS: dict[str, NetworkKind] = {k.name: k for k in _NETWORKS}


def device_of_product(product: str) -> DeviceKind | None:
    """The library's entry for what a driver calls a device: `NVIDIA A100-SXM4-80GB`; None where it has none."""
    name = product.removeprefix("NVIDIA ").removeprefix("Tesla ")
    return next((k for k in _DEVICES if name in k.products), None)
