"""Whatever ends a process that has a lab, and whenever: no namespace, no bridge and no process is left. Needs root."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autopar.lab import unavailable_reason
from tests.lab.left import ROOT, await_nothing_left, await_true, bridges, environment, namespaces, processes, runs

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

HOSTS = 4
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]

# A rank that leaves its process group, and one that even forgets where it comes from.
RANK = """
import os, subprocess, sys, time
from pathlib import Path
children = [subprocess.Popen(["sleep", "600"], start_new_session=True)]
if os.environ["GLOO_SOCKET_IFNAME"] == "eth0":
    children.append(subprocess.Popen(["sleep", "600"], start_new_session=True, env={"PATH": os.environ["PATH"]}))
pids = [os.getpid(), *(child.pid for child in children)]
Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(map(str, pids)))
time.sleep(600)
"""
OWNER = f"""
import sys
from autopar.lab import Lab, launch, loopback
from autopar.spec.cluster import ClusterSpec
cluster = ClusterSpec.loads("hosts: [{{name: w, count: {HOSTS}, devices: 1 x cpu}}]\\nnetwork: 1GbE")
with (Lab.of if sys.argv[1] == "lab" else loopback)(cluster) as lab:
    launch(lab.ranks, [sys.executable, "-c", {RANK!r}, sys.argv[2]], timeout_s=600)
"""


@contextmanager
def _owner(kind: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that brings up a lab, with a rank on each."""
    before = bridges()
    argv = [sys.executable, "-c", OWNER, kind, str(folder)]
    said = folder.with_name(f"{folder.name}.stderr")
    with said.open("wb") as file, subprocess.Popen(argv, cwd=ROOT, env=environment(), stderr=file) as owner:
        try:
            yield owner
        except subprocess.TimeoutExpired:  # Its fault handler writes where it stands.
            owner.send_signal(signal.SIGABRT)
            owner.wait(timeout=5)
            pytest.fail(f"the owner did not end:\n{said.read_text()}")
        finally:
            owner.kill()
    await_nothing_left(owner.pid)
    assert bridges() == before


def _pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.iterdir() for pid in file.read_text().split()]


def _all_run(folder: Path) -> bool:
    return len([file for file in folder.iterdir() if file.read_text()]) == HOSTS


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("moment", [1, HOSTS, HOSTS + 1])
def test_while_the_lab_comes_up(tmp_path: Path, number: signal.Signals, moment: int) -> None:
    """As soon as there are so many namespaces, of the hosts' and one more."""
    with _owner("lab", tmp_path) as owner:
        await_true(lambda: len(namespaces(owner.pid)) >= moment, "the lab did not come up")
        owner.send_signal(number)
        owner.wait(timeout=30)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_ranks_are_started(tmp_path: Path, number: signal.Signals) -> None:
    with _owner("lab", tmp_path) as owner:
        await_true(lambda: list(tmp_path.iterdir()), "no rank came up")
        owner.send_signal(number)
        owner.wait(timeout=30)


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGHUP, signal.SIGABRT])
def test_while_ranks_run(tmp_path: Path, number: signal.Signals) -> None:
    with _owner("lab", tmp_path) as owner:
        await_true(lambda: _all_run(tmp_path), "the ranks did not come up")
        started = _pids(tmp_path)
        assert len(started) == 3 * HOSTS and all(map(runs, started))
        owner.send_signal(number)
        owner.wait(timeout=30)
    assert not any(map(runs, started))


def test_a_signal_in_the_middle_of_cleaning_up(tmp_path: Path) -> None:
    with _owner("lab", tmp_path) as owner:
        await_true(lambda: _all_run(tmp_path), "the ranks did not come up")
        started = _pids(tmp_path)
        owner.send_signal(signal.SIGINT)
        await_true(lambda: len(namespaces(owner.pid)) <= HOSTS, "the lab stays")
        owner.send_signal(signal.SIGINT)
        owner.wait(timeout=30)
    assert not any(map(runs, started))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_on_loopback_go_too(tmp_path: Path, number: signal.Signals) -> None:
    with _owner("loopback", tmp_path) as owner:
        await_true(lambda: _all_run(tmp_path), "the ranks did not come up")
        started = _pids(tmp_path)
        assert len(started) == 2 * HOSTS
        owner.send_signal(number)
        owner.wait(timeout=30)
    assert not any(map(runs, started))


@pytest.mark.parametrize("kind", ["lab", "loopback"])
def test_when_a_rank_is_killed_all_go(tmp_path: Path, kind: str) -> None:
    with _owner(kind, tmp_path) as owner:
        await_true(lambda: _all_run(tmp_path), "the ranks did not come up")
        started = _pids(tmp_path)
        subprocess.run(["kill", "-KILL", tmp_path.joinpath("2").read_text().split()[0]], check=True)
        assert owner.wait(timeout=30) == 1  # JobFailed
    assert not any(map(runs, started))


def test_the_watchdog_itself_leaves_with_its_owner(tmp_path: Path) -> None:
    with _owner("lab", tmp_path) as owner:
        await_true(lambda: _all_run(tmp_path), "the ranks did not come up")
        watchdogs = [line for line in processes(owner.pid) if "watch_over" in line]
        assert len(watchdogs) == 1
        subprocess.run(["kill", "-TERM", watchdogs[0].split(":")[0]], check=True)
        assert runs(int(watchdogs[0].split(":")[0])), "a watchdog ends with its owner, not with a signal to all"
        owner.kill()
