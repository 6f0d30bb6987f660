"""What work on one device takes: nodes of the graph by a roofline, copies and optimizer updates by their bytes.

A node takes the longer of its arithmetic and its memory traffic, and a fixed time to be started: the roofline of
Williams, Waterman and Patterson (CACM 2009). Peaks come from the cluster; the fractions of them that real kernels
reach stand below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.ir.training_graph import TrainingGraph
from autopar.ops.values import Work
from autopar.spec.calibration import DeviceRates
from autopar.spec.machines import Device
from autopar.spec.units import Figure, Provenance, guess, weakest

FLOPS_FRACTION = 0.75
"""Fraction of a device's peak FLOP/s that matrix products and convolutions reach. PyTorch's own estimator assumes the
same (torch/distributed/_tools/runtime_estimator.py); Calculon's A100 tables lie between 0.5 and 0.9."""

MEMORY_FRACTION = 0.8
"""Fraction of the memory bandwidth that elementwise kernels and copies reach. [Empirical: STREAM-like kernels reach
0.75 to 0.9.]"""

CPU_NODE_START_S = 8e-6
"""Seconds to start one node on a CPU: the interpreter and PyTorch's dispatcher. [Empirical: 5 to 12 us.]"""

GPU_NODE_START_S = 4e-6
"""Seconds to launch one kernel, where launches are not hidden by the kernels before. [Empirical: 3 to 6 us.]"""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in practice: as measured, or peaks times the fractions above."""

    flops_per_s: float
    bytes_per_s: float
    start_s: float
    update_bytes_per_s: float
    """Bytes a second, read and written, in an optimizer's update."""

    @classmethod
    def of(
        cls, device: Device, dtype: str, measured: DeviceRates | None = None, update_bytes_per_s: float | None = None
    ) -> Rates:
        """The rates of a device that computes in `dtype`. `update_bytes_per_s`: as it was measured of the optimizer
        itself."""
        flops_per_s = FLOPS_FRACTION * device.flops_per_s(dtype).value
        if measured is not None:
            flops_per_s = measured.flops_per_s.get(dtype, flops_per_s)
            updates = update_bytes_per_s or measured.update_bytes_per_s
            return cls(flops_per_s, measured.bytes_per_s, measured.start_s, updates)
        bytes_per_s = MEMORY_FRACTION * device.memory_bytes_per_s.value
        start_s = CPU_NODE_START_S if is_cpu(device) else GPU_NODE_START_S
        return cls(flops_per_s, bytes_per_s, start_s, update_bytes_per_s or bytes_per_s)

    def on(self, device: Rates, other: Rates) -> Rates:
        """What was measured of `other`, as it would be of `device`, by the figures of both."""
        return Rates(
            self.flops_per_s * (device.flops_per_s / other.flops_per_s),
            self.bytes_per_s * (device.bytes_per_s / other.bytes_per_s),
            self.start_s,
            self.update_bytes_per_s * (device.bytes_per_s / other.bytes_per_s),
        )

    def seconds(self, work: Work) -> float:
        """Seconds of an operation, or of one node of the graph: the longer of its arithmetic and its memory traffic,
        what an optimizer reads and writes, and the kernels' starts."""
        moved_s = max(work.flops / self.flops_per_s, work.moved_bytes / self.bytes_per_s)
        return moved_s + work.updated_bytes / self.update_bytes_per_s + work.kernels * self.start_s


def is_cpu(device: Device) -> bool:
    """Whether the device is (a share of) a host's processor, whose network traffic takes its own cores."""
    return device.host_link.name == "memory"


def compute_dtype(graph: TrainingGraph) -> str:
    """The number format of autocast, where the graph was captured under it, else that which most of the parameters
    have; the graph does not say what each node computes in."""
    if graph.autocast is not None:
        return graph.autocast
    count = Counter[str]()
    for p in graph.model.parameters:
        count[p.dtype] += p.numel
    return max(count, key=count.__getitem__, default="float32")


def node_times(graph: TrainingGraph, rates: Rates, measured_s: Mapping[str, float] | None = None) -> list[float]:
    """Seconds of each of the graph's nodes. Views are free. `measured_s`, by node name, comes first."""
    measured_s = measured_s or {}
    return [_node_s(n.name, n.flops, n.bytes_moved, rates, measured_s) for n in graph.compute]


def _node_s(name: str, flops: int, bytes_moved: int, rates: Rates, measured_s: Mapping[str, float]) -> float:
    if name in measured_s:
        return measured_s[name]
    return rates.seconds(Work(flops, bytes_moved, kernels=1)) if flops or bytes_moved else 0.0


def compute_provenance(
    graph: TrainingGraph,
    devices: Sequence[Device],
    measured_s: Mapping[str, float] | None,
    measured: Mapping[str, DeviceRates] = MappingProxyType({}),
) -> Provenance:
    """The weakest figure behind the compute time: measured where every node was; guessed where the kinds of devices
    were, in the number format that is computed in, as `measured` says by kind: what a graph's kernels reach of that is
    a guess; else the devices'. [Empirical: on a processor core, the suite's ten models take 0.74 to 5.6 times as long
    as a roofline of its measured rates says, seven of them within 40 %]"""
    dtype = compute_dtype(graph)
    if measured_s and all(n.name in measured_s for n in graph.compute if n.flops or n.bytes_moved):
        return "measured"
    if all(d.kind in measured and dtype in measured[d.kind].flops_per_s for d in devices):
        return "guessed"
    figures: list[Figure] = [f for d in devices for f in (d.flops_per_s(dtype), d.memory_bytes_per_s)]
    return weakest(*figures) if figures else guess(0.0).provenance
