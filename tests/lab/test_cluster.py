"""A lab of a cluster: who is where, who reaches whom, and at which rate. Needs root."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import pytest

from autopar.lab import Host, Lab, LabUnavailable, launch, loopback, unavailable_reason
from autopar.spec.cluster import ClusterSpec
from tests.lab.test_wiring import RACKS, RING, TRIANGLE

needs_root = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

# Rank 1 takes from rank 0 what comes within the time; its count says how fast the way is.
TAKE = """
import os, socket, sys, time
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
seconds = float(sys.argv[1])
if os.environ["RANK"] == "0":
    with socket.create_server((address, port)) as server:
        peer, _ = server.accept()
        with peer:
            try:
                while True:
                    peer.sendall(bytes(1 << 16))
            except ConnectionError:
                pass
else:
    while True:
        try:
            peer = socket.create_connection((address, port), timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    count, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        count += len(peer.recv(1 << 16))
    print(8 * count / (time.monotonic() - start))
"""
GREET = """
import os, socket, sys, threading
me, port = sys.argv[1], 5000
def greet():
    with socket.create_server(("0.0.0.0", port)) as server:
        print("ready", flush=True)
        while True:
            peer, _ = server.accept()
            with peer:
                peer.sendall(me.encode())
threading.Thread(target=greet, daemon=True).start()
for line in sys.stdin:
    with socket.create_connection((line.strip(), port), timeout=10) as peer:
        print(peer.recv(100).decode(), flush=True)
"""


def _rate_bps(sender: Host, receiver: Host, seconds: float = 1.0) -> float:
    return float(launch([sender, receiver], [sys.executable, "-c", TAKE, str(seconds)], timeout_s=60)[1])


def _names(hosts: Sequence[Host]) -> list[str]:
    return [host.name for host in hosts]


MIXED = """
hosts:
  - name: worker
    count: 2
    devices: 2 x cpu
    bandwidth: {send: 20 Mbit/s, receive: 200 Mbit/s}
  - {name: server, serves: true}
  - {name: last, devices: 1 x cpu, bandwidth: 100 Mbit/s}
network: {bandwidth: 400 Mbit/s}
"""


@pytest.fixture(scope="module")
def mixed() -> Iterator[Lab]:
    with Lab.of(ClusterSpec.loads(MIXED), scale=0.5) as lab:
        yield lab


@needs_root
def test_hosts_stand_in_the_clusters_order_and_ranks_on_their_hosts(mixed: Lab) -> None:
    assert _names(mixed.hosts) == ["worker-0", "worker-1", "server", "last"]
    assert _names(mixed.ranks) == ["worker-0", "worker-0", "worker-1", "worker-1", "last"]
    assert mixed.emulated
    assert mixed.note.endswith("every rate times 0.5")
    assert mixed.rates_bps == (10e6, 10e6, 200e6, 50e6)


@needs_root
def test_out_and_in_have_rates_of_their_own(mixed: Lab) -> None:
    """10 Mbit/s out of a worker, 100 Mbit/s into it. A busy machine is late, but never ten times as fast."""
    worker, server = mixed.hosts[0], mixed.hosts[2]
    assert 4e6 < _rate_bps(worker, server) < 20e6
    assert 30e6 < _rate_bps(server, worker) < 150e6


@needs_root
def test_hosts_have_rates_of_their_own(mixed: Lab) -> None:
    server, last = mixed.hosts[2:]
    assert 20e6 < _rate_bps(server, last) < 75e6


@needs_root
def test_ranks_of_a_host_talk_past_its_cable(mixed: Lab) -> None:
    worker, other = mixed.ranks[:2]
    assert worker == other
    before = worker.bytes_sent()
    assert _rate_bps(worker, other, 0.3) > 100e6
    assert worker.bytes_sent() == before


@needs_root
def test_others_hear_nothing_of_a_transfer(mixed: Lab) -> None:
    *others, server, last = mixed.hosts
    before = [(host.bytes_sent(), host.bytes_received()) for host in others]
    sent, received = last.bytes_sent(), server.bytes_received()
    _rate_bps(last, server, 0.3)
    assert [(host.bytes_sent(), host.bytes_received()) for host in others] == before
    assert last.bytes_sent() - sent > 500_000
    assert server.bytes_received() - received > 500_000


@needs_root
@pytest.mark.parametrize("text", [RACKS, RING, TRIANGLE], ids=["racks", "ring", "triangle"])
def test_every_host_reaches_every_other_through_any_network(text: str) -> None:
    with Lab.of(ClusterSpec.loads(text), scale=0.01) as lab:
        greeters = [
            host.popen([sys.executable, "-c", GREET, host.name], stdin=-1, stdout=-1, bufsize=1) for host in lab.hosts
        ]
        for process in greeters:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in greeters:
            assert process.stdin is not None and process.stdout is not None
            for host in lab.hosts:
                process.stdin.write(f"{host.address}\n")
                assert process.stdout.readline() == f"{host.name}\n"
        for process in greeters:
            process.kill()
            process.communicate()


@needs_root
def test_the_link_between_two_switches_is_shared() -> None:
    text = """
hosts:
  - {name: left, count: 2, devices: 1 x cpu, switch: a}
  - {name: right, count: 2, devices: 1 x cpu, switch: b}
network:
  bandwidth: 400 Mbit/s
  switches: [a, b]
  links: [{between: [a, b], bandwidth: 20 Mbit/s}]
"""
    with Lab.of(ClusterSpec.loads(text)) as lab:
        left, other, right, _ = lab.hosts
        assert _rate_bps(left, other, 0.3) > 60e6
        assert 8e6 < _rate_bps(left, right) < 40e6


@needs_root
def test_a_lab_of_one_host_has_its_loopback() -> None:
    with Lab.of(ClusterSpec.local(2)) as lab:
        assert _rate_bps(lab.ranks[0], lab.ranks[1], 0.1) > 1e6
        assert lab.hosts[0].namespace is not None
        assert lab.rates_bps == (None,)


def test_hosts_may_have_cores_for_themselves() -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("one core alone")
    asks = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
    with Lab([None, None], cores_apart=True) as lab:
        first, second = ({*map(int, h.run(asks, capture_output=True).stdout.split())} for h in lab.hosts)
    assert first and second and not first & second and first | second <= usable
    with pytest.raises(ValueError, match="cannot have cores apart"):
        Lab([None] * (len(usable) + 1), cores_apart=True)


def test_hosts_stay_on_a_core_where_as_many_ranks_fall_to_each() -> None:
    """Else a step takes longer while more ranks than that happen to be on one of them."""
    usable = sorted(os.sched_getaffinity(0))
    count = 2 * len(usable)
    with Lab([None] * (count + 1), placement=range(count)) as lab:
        assert [h.cores for h in lab.hosts] == [*((core,) for core in usable for _ in range(2)), ()], "a server on any"
    assert {h.cores for h in _hosts(Lab([None] * (count + 1)))} == {()}, "one core would have three"
    assert {h.cores for h in _hosts(Lab([None] * len(usable)))} == {()}, "no core has several"


def _hosts(lab: Lab) -> tuple[Host, ...]:
    with lab:
        return lab.hosts


def test_loopback_has_the_same_face() -> None:
    with loopback(ClusterSpec.loads(MIXED)) as lab:
        assert _names(lab.hosts) == ["worker-0", "worker-1", "server", "last"]
        assert _names(lab.ranks) == ["worker-0", "worker-0", "worker-1", "worker-1", "last"]
        assert not lab.emulated
        assert "loopback" in lab.note
        script = "import os; print(os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'])"
        lines = launch(lab.ranks, [sys.executable, "-c", script], timeout_s=30)
    assert [line.split() for line in lines] == [["0", "0"], ["1", "0"], ["0", "1"], ["1", "1"], ["0", "2"]]


def test_a_lab_says_why_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable_reason.cache_clear()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    try:
        with pytest.raises(LabUnavailable, match="network namespaces need root"), Lab.of(ClusterSpec.loads(MIXED)):
            pass
    finally:
        unavailable_reason.cache_clear()
