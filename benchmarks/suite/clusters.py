"""The clusters of the suite: hosts of the lab, on this machine, and clusters of GPUs with virtual compute.

    CLUSTERS["4x1g"].cluster      a ClusterSpec

The lab's hosts share this machine's cores and memory evenly, whichever network namespace they are in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.backends.base import Backend
from autopar.backends.gloo import GLOO
from autopar.errors import did_you_mean
from autopar.spec.cluster import ClusterSpec, DeviceSpec, DuplexSpec, HostSpec, NetworkSpec
from autopar.spec.units import Figure


@dataclass(frozen=True)
class ClusterCase:
    """A cluster of the suite."""

    name: str
    about: str
    build: Callable[[], ClusterSpec]
    virtual: bool = False
    """Whether compute is a sleep of the named device's time, since that device is not here."""
    slowdown: float = 1.0
    """How many times slower than the described cluster the lab runs: rates are divided by it, sleeps multiplied."""

    @property
    def cluster(self) -> ClusterSpec:
        """Made anew on each call: the figures of CPU devices are this machine's."""
        return self.build()


def case_named(name: str) -> ClusterCase:
    """The cluster of that name; raises `KeyError` with the nearest right name."""
    if name not in CLUSTERS:
        raise KeyError(f"no cluster '{name}' in the suite{did_you_mean(name, CLUSTERS)}")
    return CLUSTERS[name]


def backend_in_lab(slowdown: float, *, virtual: bool) -> Backend:
    """gloo, as a cluster sees it whose lab runs `slowdown` times slower: what a collective costs beside its bytes is
    that much less there. It takes nothing from virtual compute, and nothing holds it up but links."""
    own = ("call_s", "hop_s", "issue_s", "round_processor_s", "exchange_processor_s")
    backend = replace(GLOO, **{name: getattr(GLOO, name) / slowdown for name in own})
    if not virtual:
        return backend
    return replace(backend, host_bytes_per_s=float("inf"), round_processor_s=0.0, exchange_processor_s=0.0)


def _bytes_per_s(mbit_per_s: float) -> Figure:
    return Figure(mbit_per_s * 1e6 / 8)


def _card(send_mbit: float, receive_mbit: float) -> DuplexSpec:
    return DuplexSpec(send=_bytes_per_s(send_mbit), receive=_bytes_per_s(receive_mbit))


def _cpus(ranks: int, ranks_in_all: int) -> DeviceSpec:
    """CPU ranks that each have an even share of this machine."""
    device: DeviceSpec = ClusterSpec.local(ranks_in_all).hosts[0].devices[0]
    return device.model_copy(update={"count": ranks})


def even(hosts: int, mbit_per_s: float, ranks: int = 1) -> Callable[[], ClusterSpec]:
    """Equal hosts of some ranks each, on one switch."""

    def build() -> ClusterSpec:
        host = HostSpec(name="host", count=hosts, devices=(_cpus(ranks, hosts * ranks),))
        return ClusterSpec(hosts=(host,), network=NetworkSpec(bandwidth=_bytes_per_s(mbit_per_s)))

    return build


def _cards(*hosts: tuple[str, int, float, float]) -> Callable[[], ClusterSpec]:
    """Hosts of one rank: (name, count, Mbit/s that a host of the entry sends, and receives), on one switch."""

    def build() -> ClusterSpec:
        device = _cpus(1, sum(count for _, count, _, _ in hosts))
        entries = (
            HostSpec(name=name, count=count, devices=(device,), bandwidth=_card(send, receive))
            for name, count, send, receive in hosts
        )
        return ClusterSpec(hosts=tuple(entries), network=NetworkSpec())

    return build


def _with_servers(mbit_per_s: float) -> Callable[[], ClusterSpec]:
    """Four workers, and two hosts of twice their rate that only serve."""

    def build() -> ClusterSpec:
        workers = HostSpec(name="worker", count=4, devices=(_cpus(1, 4),), bandwidth=_card(mbit_per_s, mbit_per_s))
        twice = _card(2 * mbit_per_s, 2 * mbit_per_s)
        servers = HostSpec(name="server", count=2, serves=True, bandwidth=twice)
        return ClusterSpec(hosts=(workers, servers), network=NetworkSpec())

    return build


def _gpus(hosts: int, kind: str, network: str) -> Callable[[], ClusterSpec]:
    """Equal hosts with one GPU each."""

    def build() -> ClusterSpec:
        host = HostSpec(name="host", count=hosts, devices=(DeviceSpec(kind=kind),))
        return ClusterSpec(hosts=(host,), network=NetworkSpec(kind=network))

    return build


_CASES = (
    ClusterCase("4x1g", "4 hosts at 1 Gbit/s", even(4, 1000)),
    ClusterCase("4x200m", "4 hosts at 200 Mbit/s", even(4, 200)),
    ClusterCase(
        "3x1g-1x200m",
        "3 hosts at 1 Gbit/s and one at 200 Mbit/s",
        _cards(("host", 3, 1000, 1000), ("slow", 1, 200, 200)),
    ),
    ClusterCase("2x2-1g", "2 hosts of 2 ranks at 1 Gbit/s", even(2, 1000, ranks=2)),
    ClusterCase(
        "4x1g-2-servers", "4 workers at 1 Gbit/s, and 2 hosts at 2 Gbit/s that only serve", _with_servers(1000)
    ),
    ClusterCase(
        "8x10g-virtual",
        "8 hosts with a T4 each at 10 Gbit/s, run 40 times slower",
        _gpus(8, "T4", "10GbE"),
        virtual=True,
        slowdown=40.0,
    ),
    ClusterCase("2x2-200m", "2 hosts of 2 ranks at 200 Mbit/s", even(2, 200, ranks=2)),
    ClusterCase(
        "4x200m-2-servers", "4 workers at 200 Mbit/s, and 2 hosts at 400 Mbit/s that only serve", _with_servers(200)
    ),
    ClusterCase("4x400m", "4 hosts at 400 Mbit/s", even(4, 400)),
    ClusterCase("3x500m", "3 hosts at 500 Mbit/s", even(3, 500)),
    ClusterCase(
        "5-mixed",
        "5 hosts: 2 at 1 Gbit/s, 2 at 500 Mbit/s, one at 250 Mbit/s",
        _cards(("fast", 2, 1000, 1000), ("middle", 2, 500, 500), ("slow", 1, 250, 250)),
    ),
    ClusterCase("2x100m", "2 hosts at 100 Mbit/s", even(2, 100)),
    ClusterCase(
        "4-uplink",
        "4 hosts that send at 250 Mbit/s and receive at 1 Gbit/s",
        _cards(("host", 4, 250, 1000)),
    ),
)
CLUSTERS: dict[str, ClusterCase] = {c.name: c for c in _CASES}
"""The first six are those that every comparison covers; the others widen the data that cost models learn from."""
