"""The hosts that this process sees: from torchrun's environment, from the machine, without loading torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from autopar.errors import ClusterSpecError
from autopar.spec.cluster_parts import DeviceSpec, DuplexSpec, HostSpec, PeakFlopsSpec
from autopar.spec.devices import CORE_FLOPS, DEVICES, device_of_product
from autopar.spec.units import Figure, guess

GUESSED_RATE = guess(1e9 / 8)
"""1 Gbit/s: what a network is taken for that says nothing of its rate."""
MIB = 1 << 20
_GROUPS = Path("/sys/fs/cgroup")
"""Where a container finds its limits."""


def local(n_ranks: int) -> HostSpec:
    """This host with `n_ranks` CPU ranks; see `ClusterSpec.local`."""
    if isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
        raise ClusterSpecError(f"ClusterSpec.local({n_ranks!r}): expected a number of ranks from 1 on")
    return HostSpec(name="localhost", devices=_cpus(n_ranks))


def detect(environment: Mapping[str, str] = os.environ) -> HostSpec:
    """The equal hosts of this job, or this machine; see `ClusterSpec.detect`. Raises `ClusterSpecError` where
    torchrun's variables contradict each other or hosts have unequal numbers of ranks."""
    n_hosts, n_local = _job(environment)
    gpus = _gpus(environment)
    if n_local is None:
        devices = _grouped(gpus) or _cpus(1)
    elif len(gpus) >= n_local:
        devices = _grouped(gpus[:n_local])
    else:
        devices = _cpus(n_local)
    if n_hosts == 1:
        return HostSpec(name="localhost", devices=devices)
    rate = _network_rate(environment)
    return HostSpec(name="host", count=n_hosts, devices=devices, bandwidth=DuplexSpec(send=rate, receive=rate))


def _job(environment: Mapping[str, str]) -> tuple[int, int | None]:
    """The number of hosts and of ranks on each, from torchrun's variables; (1, None) without them."""
    world = _number(environment, "WORLD_SIZE")
    if world is None:
        return 1, None
    here = _number(environment, "LOCAL_WORLD_SIZE")
    if here is None:
        address = environment.get("MASTER_ADDR", "localhost")
        if address in ("localhost", "::1") or address.startswith("127."):
            return 1, world
        raise ClusterSpecError(
            f"WORLD_SIZE is {world}, but LOCAL_WORLD_SIZE is not set, so the number of hosts is unknown: "
            "start with torchrun, or describe the cluster in a file (ClusterSpec.load)"
        )
    hosts = _number(environment, "GROUP_WORLD_SIZE") or max(1, world // here)
    if hosts * here != world:
        raise ClusterSpecError(
            f"{hosts} hosts with {here} ranks, as on this one, make {hosts * here} ranks, but WORLD_SIZE is {world}: "
            "where hosts differ, describe the cluster in a file (ClusterSpec.load)"
        )
    group = environment.get("GROUP_RANK")
    if group is not None and not (group.isdecimal() and int(group) < hosts):
        raise ClusterSpecError(f"GROUP_RANK is '{group}', expected a host's number from 0 to {hosts - 1}")
    return hosts, here


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ClusterSpecError(f"{name} is '{text}', expected a whole number from 1 on, as torchrun sets it")
    return int(text)


def _cpus(n_ranks: int) -> tuple[DeviceSpec, ...]:
    """This host's cores and memory, shared out."""
    kind = DEVICES["cpu"]
    memory = memory_bytes()
    share = guess(cores() / n_ranks * CORE_FLOPS)
    return (
        DeviceSpec(
            kind="cpu",
            count=n_ranks,
            memory=Figure(memory // n_ranks, "measured") if memory else kind.memory_bytes,
            peak_flops=PeakFlopsSpec(float64=guess(share.value / 2), float32=share, bfloat16=share, float16=share),
        ),
    )


def processor() -> str:
    """What this machine's processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def threads_of_rank(n_local: int, environment: Mapping[str, str] = os.environ) -> str:
    """Threads that a rank computes with, for `OMP_NUM_THREADS`, where so many are on this machine: as many as that
    variable says already, or else its part of the cores."""
    return environment.get("OMP_NUM_THREADS") or str(max(1, cores() // n_local))


def cores() -> int:
    """The cores that this process may use: those that it may run on, or as many as the container's share of time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    version_1 = " ".join(_read(_GROUPS / "cpu" / f"cpu.cfs_{which}_us") for which in ("quota", "period"))
    for text in (_read(_GROUPS / "cpu.max"), version_1):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max", or -1, where there is no limit
            usable = min(usable, max(1, int(quota) // int(period)))
    return usable


def memory_bytes() -> int | None:
    """The host's memory, or what the container may use of it; whole MiB, so that equal hosts report the same."""
    limits = [limit for limit, _, _ in _memory_groups()]
    if "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits) // MIB * MIB if limits else None


def free_memory_bytes() -> int | None:
    """What of `memory_bytes` can be had now, files that are only kept in memory counted as free; `None` where nothing
    tells."""
    free = [max(0, limit - used + _field(kept, "inactive_file")) for limit, used, kept in _memory_groups()]
    known = _field(_read("/proc/meminfo").replace(":", ""), "MemAvailable")
    if known:
        free.append(known << 10)
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(free) if free else None


def _memory_groups() -> list[tuple[int, int, str]]:
    """What the container may use of the memory, what it uses, and what the kernel tells of that; by each of the two
    versions of control groups that has a limit."""
    old = _GROUPS / "memory"
    found = []
    for limit, used, told in (
        (_GROUPS / "memory.max", _GROUPS / "memory.current", _GROUPS / "memory.stat"),
        (old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat"),
    ):
        if (most := _read(limit)).isdecimal():
            taken = _read(used)
            found.append((int(most), int(taken) if taken.isdecimal() else 0, _read(told)))
    return found


def _field(table: str, name: str) -> int:
    """The number behind a name, of a table of a name and a number a line; 0 where it is not there."""
    words = (line.split() for line in table.splitlines())
    return next((int(w[1]) for w in words if len(w) > 1 and w[0] == name and w[1].isdecimal()), 0)


def _gpus(environment: Mapping[str, str]) -> list[DeviceSpec]:
    """The GPUs that this process may use: asked of torch where it is loaded, else of the driver's own tool."""
    torch = sys.modules.get("torch")
    if torch is not None:
        if not torch.cuda.is_available():
            return []
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [_gpu(p.name, p.total_memory) for p in found]
    listed = _nvidia_smi()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [_gpu(name, memory) for _, _, name, memory in listed]
    chosen = []
    for wanted in (word.strip() for word in visible.split(",")):
        match = [g for g in listed if wanted == g[0] or (wanted and g[1].startswith(wanted))]
        if not match:
            break  # as CUDA does: the first device that is not there ends the list
        chosen.append(_gpu(match[0][2], match[0][3]))
    return chosen


def _nvidia_smi() -> list[tuple[str, str, str, int]]:
    """Index, UUID, name and memory in bytes of each GPU; empty where there is no driver, or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[3].isdecimal():
            gpus.append((fields[0], fields[1], fields[2], int(fields[3]) * MIB))
    return gpus


def _gpu(product: str, memory_bytes: int) -> DeviceSpec:
    """A GPU by what its driver calls it. One that the library does not know has the figures of any `gpu`."""
    memory = Figure(memory_bytes // MIB * MIB, "measured")
    known = device_of_product(product)
    if known is not None:
        return DeviceSpec(kind=known.name, memory=memory)
    any_gpu = DEVICES["gpu"]
    peak = any_gpu.peak_flops
    return DeviceSpec(
        kind="".join(c if c.isalnum() else "-" for c in product).strip("-")[:60] or "gpu",
        memory=memory,
        memory_bandwidth=any_gpu.memory_bytes_per_s,
        peak_flops=PeakFlopsSpec(
            float64=peak.float64, float32=peak.float32, bfloat16=peak.bfloat16, float16=peak.float16
        ),
    )


def _grouped(gpus: list[DeviceSpec]) -> tuple[DeviceSpec, ...]:
    """Equal neighbours as one entry with a count."""
    return tuple(gpu.model_copy(update={"count": len(list(equal))}) for gpu, equal in groupby(gpus))


def _network_rate(environment: Mapping[str, str]) -> Figure:
    """The rate that the network card in use says it has. Virtual cards say nothing true, so theirs is a guess."""
    name = environment.get("GLOO_SOCKET_IFNAME") or environment.get("NCCL_SOCKET_IFNAME") or _default_interface()
    card = Path("/sys/class/net", name) if name and "/" not in name else None
    if card is None or not (card / "device").exists():
        return GUESSED_RATE
    speed = _read(card / "speed")  # in Mbit/s; -1 where it is not known
    return Figure(int(speed) * 1e6 / 8) if speed.isdecimal() and int(speed) > 0 else GUESSED_RATE


def _default_interface() -> str | None:
    for line in _read("/proc/net/route").splitlines()[1:]:
        interface, destination, *_ = line.split()
        if destination == "00000000":
            return interface
    return None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
