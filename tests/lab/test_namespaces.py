"""The lab itself: rates, counters, jobs, and that nothing is left behind. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from autopar.lab import (
    Host,
    Job,
    JobFailed,
    JobTimeout,
    Lab,
    cleanup_stale,
    launch,
    private_namespace,
    this_machine,
    unavailable_reason,
)
from autopar.lab.build import burst_bytes
from autopar.lab.wiring import Wire, Wiring
from tests.lab.left import ROOT, await_true, environment, namespaces, processes, runs

MEGABYTE = 1_000_000

# Rank 0 sends when rank 1 says so; rank 1 prints how long it took. A process that the machine makes wait in between
# does not disturb this: the kernel goes on receiving, up to its buffers' size.
TRANSFER = """
import os, socket, sys, time
size, port = int(sys.argv[1]), int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], port)) as server:
        peer, _ = server.accept()
        with peer:
            peer.recv(1)
            peer.sendall(bytes(size))
            peer.recv(1)
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)  # each try is some 130 bytes, which loopback counts too
    with peer:
        start = time.perf_counter()
        peer.sendall(b"!")
        while size:
            size -= len(peer.recv(min(size, 1 << 20)))
        print(time.perf_counter() - start)
"""


@pytest.fixture(autouse=True)
def _lab_available() -> None:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


def _transfer_s(hosts: Sequence[Host], size: int) -> float:
    return float(launch(hosts, [sys.executable, "-c", TRANSFER, str(size)], timeout_s=60)[1])


def _rate_bps(lab: Lab, size: int) -> float:
    slowest = min(rate for rate in lab.rates_bps if rate is not None)
    return 8 * (size - burst_bytes(slowest)) / _transfer_s(lab.hosts, size)


def test_a_transfer_runs_at_the_rate_of_the_link() -> None:
    with Lab(rates_bps=[100e6, 100e6]) as lab:
        rate_bps = _rate_bps(lab, 10 * MEGABYTE)
    assert 30e6 < rate_bps < 105e6  # a busy machine is late, but never too early


def test_the_slower_link_sets_the_rate() -> None:
    with Lab(rates_bps=[100e6, 20e6]) as lab:
        rate_bps = _rate_bps(lab, 3 * MEGABYTE)
    assert 6e6 < rate_bps < 21e6


def test_counters_count_what_was_sent() -> None:
    with Lab(rates_bps=[None, None]) as lab:
        sender, receiver = lab.hosts
        assert sender.bytes_sent() == 0
        _transfer_s(lab.hosts, 5 * MEGABYTE)
        assert sender.bytes_sent() == pytest.approx(5 * MEGABYTE, rel=0.06)  # headers of at most 66 in 1514 bytes
        assert receiver.bytes_received() == pytest.approx(sender.bytes_sent(), rel=0.001)
        assert receiver.bytes_sent() < 0.06 * sender.bytes_sent()


def test_a_private_namespace_counts_all_ranks_and_nothing_else() -> None:
    with private_namespace() as host:
        assert host.bytes_sent() == 0
        _transfer_s([host, host], 10 * MEGABYTE)
        assert host.bytes_sent() == host.bytes_received() == pytest.approx(10 * MEGABYTE, rel=0.02)


def test_two_labs_stand_side_by_side() -> None:
    with Lab(rates_bps=[50e6, 50e6]) as first, Lab(rates_bps=[None, None]) as second:
        _transfer_s(second.hosts, MEGABYTE)
        assert second.hosts[0].bytes_sent() > MEGABYTE
        assert first.hosts[0].bytes_sent() == 0
        assert len({h.namespace for h in first.hosts + second.hosts}) == 4


def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Lab(rates_bps=[1e9] * 2) as lab:
        left_running = lab.hosts[0].popen(["sleep", "600"])
        assert len(namespaces(os.getpid())) == 3
        raise ZeroDivisionError
    assert namespaces(os.getpid()) == []
    assert left_running.wait(timeout=10) == -signal.SIGKILL


def test_nothing_is_left_when_bringing_up_fails() -> None:
    refused = Wiring(("a", "b"), ("s",), (Wire("a", "s", 1e9, 1e9), Wire("b", "s", -5.0, 1e9)), {})
    message = r"`tc -n autopar-\d+-\d+-b -batch -` failed: [^\0]*-:1: qdisc .* rate -5bit"
    with pytest.raises(RuntimeError, match=message), Lab(wiring=refused):
        pass
    assert namespaces(os.getpid()) == []


OWNER = """
import sys, time
from autopar.lab import Lab
with Lab(rates_bps=[1e9] * 2) as lab:
    process = lab.hosts[1].popen(["sleep", "600"])
    print(process.pid, flush=True)
    time.sleep(600)
"""


def _start_owner() -> tuple[subprocess.Popen[str], int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    owner, child = _start_owner()
    with owner:
        assert len(namespaces(owner.pid)) == 3
        owner.send_signal(number)
        owner.wait(timeout=30)
    assert namespaces(owner.pid) == []
    # A process that was killed has left its namespace a moment before it is a zombie.
    await_true(lambda: not runs(child), "the child runs on")


def test_what_is_left_where_the_watchdog_is_killed_too_is_found_and_removed() -> None:
    owner, child = _start_owner()
    with owner:
        watchdogs = [int(line.split(":")[0]) for line in processes(owner.pid) if "watch_over" in line]
        for pid in [*watchdogs, owner.pid]:
            os.kill(pid, signal.SIGKILL)
    assert len(watchdogs) == 1
    assert len(namespaces(owner.pid)) == 3
    assert runs(child)
    with Lab(rates_bps=[None]) as alive:
        assert namespaces(owner.pid) == []  # `up` has called cleanup_stale
        assert not [name for name in cleanup_stale() if f"-{owner.pid}-" in name]
        assert len(alive.hosts) == 1
    await_true(lambda: not runs(child), "the child runs on")


def test_a_job_gives_ranks_the_environment_of_torchrun() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]
    with Lab(rates_bps=[None, None]) as lab:
        first, second = lab.hosts
        script = f"import os; print(*(os.environ[n] for n in {names}))"
        lines = launch([first, second, second], [sys.executable, "-c", script], timeout_s=30)
    assert [line.split() for line in lines] == [
        ["0", "3", "0", "1", "0", first.address],
        ["1", "3", "0", "2", "1", first.address],
        ["2", "3", "1", "2", "1", first.address],
    ]


def test_when_one_rank_dies_the_others_are_ended_and_its_words_passed_on() -> None:
    script = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('out of luck')\ntime.sleep(600)"
    host = this_machine()
    with Job([host] * 3, [sys.executable, "-c", script]) as job:
        with pytest.raises(JobFailed, match=r"rank 1 ended with exit status 1[^\0]*ValueError: out of luck"):
            job.wait(timeout_s=60)
        assert all(process.poll() is not None for process in job._ranks)


def test_a_job_that_takes_too_long_is_ended() -> None:
    script = "import os, time; time.sleep(600 * int(os.environ['RANK']))"
    with pytest.raises(JobTimeout, match=r"ranks \[1\] were not done after 2 s[^\0]*line 1 in <module>"):
        launch([this_machine()] * 2, [sys.executable, "-c", script], timeout_s=2)


ECHO = """
import os, time
from autopar.lab import serve
def answer(request):
    print("noise")
    if request["n"] == 2 and os.environ["RANK"] == "1":
        raise SystemExit("no twos")
    if request["n"] == 4:
        raise SystemExit
    if request["n"] == 5:
        time.sleep(600)
    return {"rank": int(os.environ["RANK"]), "n": request["n"] * 10}
serve(answer)
"""


def test_a_job_that_stays_up_answers_requests() -> None:
    with Job([this_machine()] * 2, [sys.executable, "-c", ECHO]) as job:
        assert job.ask({"n": 1}, timeout_s=30) == [{"rank": 0, "n": 10}, {"rank": 1, "n": 10}]
        assert job.ask({"n": 3}, timeout_s=30) == [{"rank": 0, "n": 30}, {"rank": 1, "n": 30}]
        with pytest.raises(JobFailed, match=r"rank 1 ended[^\0]*no twos"):
            job.ask({"n": 2}, timeout_s=30)


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [(4, JobFailed, r"ranks \[.*\] ended without an answer"), (5, JobTimeout, r"ranks \[0, 1\] were")],
)
def test_a_job_that_does_not_answer_is_an_error(n: int, error: type[Exception], message: str) -> None:
    with Job([this_machine()] * 2, [sys.executable, "-c", ECHO]) as job, pytest.raises(error, match=message):
        job.ask({"n": n}, timeout_s=2)
