"""Collectives: the bytes on every link, and the time they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.backends.base import COLLECTIVES
from autopar.backends.exchange import ROUNDS_BYTES
from autopar.backends.gloo import GLOO
from autopar.backends.nccl import NCCL
from autopar.cost_models.network import Host, Network, backend_of
from autopar.ops.base import Call
from autopar.ops.collectives import wire_bytes
from autopar.ops.measured import collective_named
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from tests.unit.synthetic import cpu_hosts

MIB = 1 << 20


def collective(
    kind: str, size_bytes: int, n: int, owner: int = 0, sizes: tuple[int, ...] = (), dtype: str = "float32"
) -> Call:
    return collective_named(kind, size_bytes // 4, n, owner=owner, sizes=sizes or None, dtype=dtype)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("rate", [0.2, 1.0, 10.0])
def test_a_large_all_reduce_takes_its_bytes_over_the_bandwidth(n: int, rate: float) -> None:
    network = Network(Topology(cpu_hosts(n, f"{rate} Gbit/s")))
    size = 64 * MIB
    expected = 2 * (n - 1) / n * size / (rate * 1e9 / 8)
    assert network.transfer(collective("all_reduce", size, n)).seconds == pytest.approx(expected, rel=0.07)


@pytest.mark.parametrize(
    ("size_bytes", "owner", "measured_s"),
    [
        (2_000_000, 0, 0.0550),
        (2_000_000, 1, 0.0549),
        (6_552_000, 0, 0.240),
        (6_552_000, 1, 0.291),
        (16 * 10**6, 1, 0.643),
    ],
)
def test_what_gloos_reduce_sends_in_vain_is_priced(size_bytes: int, owner: int, measured_s: float) -> None:
    """Measured between two hosts at 300 Mbit/s. Its last segments are shorter: owners differ."""
    network = Network(Topology(cpu_hosts(2, "0.3 Gbit/s")))
    assert network.transfer(collective("reduce", size_bytes, 2, owner)).seconds == pytest.approx(measured_s, rel=0.03)


def test_two_ranks_send_in_one_direction_at_a_time() -> None:
    """Over their one connection each says behind its own bytes that it is ready for the other's."""
    pair, four = (Network(Topology(cpu_hosts(n, "0.3 Gbit/s"))) for n in (2, 4))
    large, small = (pair.transfer(collective("broadcast", size, 2)) for size in (8 * MIB, 4))
    assert large.connection > 0.95
    assert small.connection < 0.05
    assert four.transfer(collective("broadcast", 8 * MIB, 4)).connection == 0.0


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
@pytest.mark.parametrize("sizes", [(), (100_000, 0, 50_000, 6 * MIB // 4 - 150_000)])
def test_links_carry_the_bytes_that_are_declared(kind: str, sizes: tuple[int, ...]) -> None:
    n = 4
    network = Network(Topology(cpu_hosts(n)))
    call = collective(kind, 6 * MIB, n, owner=2, sizes=sizes)
    on_link = dict(zip((link.id for link in network.links), network.link_bytes(call), strict=True))
    sent, received = wire_bytes(call, n)
    for rank in range(n):
        assert on_link[f"host-{rank}->switch"] == pytest.approx(sent[rank], abs=1)
        assert on_link[f"switch->host-{rank}"] == pytest.approx(received[rank], abs=1)


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_a_transfer_is_never_slower_on_a_faster_network(kind: str) -> None:
    times = [
        Network(Topology(cpu_hosts(4, f"{rate} Gbit/s"))).transfer(collective(kind, 8 * MIB, 4)).seconds
        for rate in (0.1, 0.5, 1, 2, 4)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] * 10


def test_ranks_of_a_host_share_its_card() -> None:
    """A ring crosses each card once; from each rank to each, all pairs of ranks on different hosts cross it: what is
    small, and sums that would be rounded on their way."""
    network = Network(Topology(cpu_hosts(2, devices="2 x cpu")))
    card = [link.id for link in network.links].index("host-0->switch")
    size = 8 * MIB
    assert network.link_bytes(collective("all_reduce", size, 4))[card] == pytest.approx(1.5 * size)
    assert network.link_bytes(collective("reduce_scatter", size, 4))[card] == pytest.approx(0.75 * size)
    small = 4 * ROUNDS_BYTES
    assert network.link_bytes(collective("reduce_scatter", small, 4))[card] == pytest.approx(small)
    narrow = collective("reduce_scatter", size, 4, dtype="bfloat16")
    assert network.link_bytes(narrow)[card] == pytest.approx(size / 2)
    # From rank 1 to both ranks of host-1; from rank 3 to both of host-0, one of which sends it on to rank 2.
    assert network.link_bytes(collective("broadcast", size, 4, owner=1))[card] == pytest.approx(2 * size)
    assert network.link_bytes(collective("broadcast", size, 4, owner=3))[card] == pytest.approx(size)


def test_hosts_move_no_more_than_their_cores_can() -> None:
    """Two ranks a host, on a network that is fast enough not to matter: each sends and receives 1.5 times the value."""
    size = 64 * MIB
    topology = Topology(cpu_hosts(2, "1000 Gbit/s", devices="2 x cpu"))
    network = Network(topology)
    assert [host.ranks for host in network.hosts] == [(0, 1), (2, 3)]
    reduce = collective("all_reduce", size, 4)
    one_machine = Network(topology, hosts=[Host((0, 1, 2, 3), 1e9)])
    transfer = one_machine.transfer(reduce)
    assert transfer.seconds == pytest.approx(4 * 3 * size / 1e9, rel=0.01)
    assert transfer.loads[-1] == pytest.approx(1.0, abs=0.01)
    assert len(transfer.loads) == len(network.links) + 1


def test_the_slowest_card_decides() -> None:
    slow = ClusterSpec.loads(
        "hosts: [{name: a, count: 3, devices: 1 x cpu},"
        " {name: b, devices: 1 x cpu, bandwidth: {send: 1 Gbit/s, receive: 0.1 Gbit/s}}]\n"
        "network: {bandwidth: 1 Gbit/s}"
    )
    size = 8 * MIB
    network = Network(Topology(slow))
    equal = Network(Topology(cpu_hosts(4)))
    reduce = collective("all_reduce", size, 4)
    assert network.transfer(reduce).seconds == pytest.approx(10 * equal.transfer(reduce).seconds, rel=0.02)
    # The slow host sends as fast as the others: it may own what is broadcast, and it is slow where others do.
    fast, slow_owner = (collective("broadcast", size, 4, owner=o) for o in (0, 3))
    assert network.transfer(slow_owner).seconds == pytest.approx(equal.transfer(slow_owner).seconds, rel=0.01)
    assert network.transfer(fast).seconds == pytest.approx(4 * equal.transfer(fast).seconds, rel=0.01)


def test_a_broadcast_goes_down_a_tree_and_a_reduce_takes_two_phases() -> None:
    """Four ranks: the root sends to two at once, one of which sends to the last; a ring, then parts to the owner."""
    size = 32 * MIB
    network = Network(Topology(cpu_hosts(4)))
    unit = size / 125e6
    broadcast = network.transfer(collective("broadcast", size, 4, owner=2)).seconds
    assert broadcast == pytest.approx((2 + 1) * unit / GLOO.fraction["broadcast"], rel=0.01)
    reduce = network.transfer(collective("reduce", size, 4, owner=2)).seconds
    # 32 segments of 1 MiB, of which gloo's ring passes on 30.
    expected = (30 / 32 + 0.75) * unit / GLOO.fraction["reduce"]
    assert reduce == pytest.approx(expected, rel=0.01)


def test_senders_of_an_all_to_all_meet_at_a_receiver_only_where_the_batch_decides_on_large_parts() -> None:
    n, line_bytes_per_s = 4, 0.4e9 / 8
    network = Network(Topology(cpu_hosts(n, "0.4 Gbit/s")))

    def fraction(part: int, expected: bool) -> float:
        few, many = (collective("all_to_all", n * n * size, n) for size in (part // 2, part))
        a, b = (network.transfer(replace(c, made=replace(c.made, expected=expected))).seconds for c in (few, many))
        return (n - 1) * part / 2 / line_bytes_per_s / (b - a)

    assert fraction(ROUNDS_BYTES, expected=True) == pytest.approx(GLOO.fraction["reduce_scatter"])
    assert fraction(8 * ROUNDS_BYTES, expected=False) == pytest.approx(GLOO.fraction["reduce_scatter"])
    assert fraction(8 * ROUNDS_BYTES, expected=True) == pytest.approx(GLOO.fraction["all_to_all"])


def test_nccl_passes_a_broadcast_along_a_chain() -> None:
    size = 256 * MIB
    network = Network(Topology(cpu_hosts(4, "25 Gbit/s", "1 x A100-80GB")))
    unit = size / (25e9 / 8)
    for kind in ("broadcast", "reduce"):
        seconds = network.transfer(collective(kind, size, 4, owner=1)).seconds
        assert seconds == pytest.approx(unit / NCCL.fraction[kind], rel=0.01)


def test_nccl_adds_up_equal_parts_around_a_ring() -> None:
    """Where hosts have eight devices, an exchange of each with each sends more than five times as much through a
    host's card. It remains for narrow numbers, which a ring would round each time, and for unequal parts."""
    n, size = 32, 256 * MIB
    network = Network(Topology(cpu_hosts(4, "400 Gbit/s", "8 x H100-80GB")))
    ring, narrow = (collective("reduce_scatter", size, n, dtype=d) for d in ("float32", "bfloat16"))
    uneven = collective("reduce_scatter", size, n, sizes=(size // 4 // n + 1, size // 4 // n - 1) * (n // 2))
    seconds = network.transfer(ring).seconds
    assert seconds == pytest.approx(network.transfer(collective("all_gather", size, n)).seconds, rel=1e-6)
    assert network.transfer(narrow).seconds > 2 * seconds
    assert network.transfer(uneven).seconds > 5 * seconds


def test_small_messages_cost_their_rounds() -> None:
    few, many = (Network(Topology(cpu_hosts(n))).transfer(collective("all_reduce", 4, n)).seconds for n in (2, 8))
    assert 5e-5 < few < many < 2e-3


def test_the_devices_imply_the_backend() -> None:
    assert backend_of(Topology(cpu_hosts())) is GLOO
    assert backend_of(Topology(cpu_hosts(2, "25 Gbit/s", "8 x A100-80GB"))) is NCCL


def test_gloo_takes_the_cores_it_computes_on() -> None:
    """Over loopback with less than a core a rank, communication leaves nothing for compute; over a slow network with
    four cores a rank, nearly everything."""
    half_a_core = "{kind: cpu, count: 4, peak_flops: 40 GFLOP/s}"
    loopback = Network(Topology(ClusterSpec.loads(f"hosts: [{{name: a, devices: {half_a_core}}}]")))
    assert min(loopback.transfer(collective("all_reduce", 16 * MIB, 4)).taken) > 0.6
    spread = Network(Topology(cpu_hosts(4)))
    assert max(spread.transfer(collective("all_reduce", 16 * MIB, 4)).taken) < 0.05


def test_each_collective_takes_processor_time_beside_that_of_its_bytes() -> None:
    """Ten small sums take more of a rank's core than one of as many bytes, and sums whose halves are exchanged by
    messages of our own take more than the library's: what two ranks were measured to take."""
    one_core = "{name: host, count: 2, devices: {kind: cpu, peak_flops: 80 GFLOP/s}}"
    network = Network(Topology(ClusterSpec.loads(f"hosts: [{one_core}]\nnetwork: {{bandwidth: 1 Gbit/s}}")))

    def core_s(*calls: Call) -> float:
        return sum(t.taken[0] * t.seconds for t in map(network.transfer, calls))

    whole = core_s(collective("all_reduce", 4 * MIB, 2))
    assert 2.5e-3 < whole < 4.5e-3
    assert core_s(*[collective("all_reduce", 4 * MIB // 10, 2)] * 10) > whole + 9 * 3e-4
    halves = core_s(collective("reduce_scatter", 4 * MIB, 2), collective("all_gather", 4 * MIB, 2))
    assert 1.3 < halves / whole < 2.2
