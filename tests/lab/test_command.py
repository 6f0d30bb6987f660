"""`autopar lab up`, `run` and `down`, from outside. Needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.lab import unavailable_reason
from autopar.lab.keeper import standing
from tests.lab.left import ROOT, await_nothing_left, await_true, environment, namespaces, processes, runs

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

CLUSTER = """
hosts:
  - {name: worker, count: 2, devices: 1 x cpu, bandwidth: {send: 40 Mbit/s, receive: 200 Mbit/s}}
  - {name: server, serves: true}
network: {bandwidth: 500 Mbit/s}
"""
SUM = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((250_000,), float(dist.get_rank() + 1))
begin = time.monotonic()
dist.all_reduce(x)
seconds = time.monotonic() - begin
print(x[0].item(), seconds, *sys.argv[1:])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / f"lab-{os.getpid()}.yaml"
    path.write_text(CLUSTER)
    return path


def _words(*args: object) -> list[str]:
    return [sys.executable, "-m", "autopar", "lab", *map(str, args)]


def _lab(*args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(_words(*args), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture
def name(cluster: Path) -> Iterator[str]:
    yield cluster.stem
    if _stands(cluster.stem):
        _lab("down", cluster.stem, check=False)  # it may be on its way out by itself
        await_true(lambda: not _stands(cluster.stem), "the lab stays")


def _stands(name: str) -> bool:
    return any(keeper.name == name for keeper in standing())


def _keeper(name: str) -> int:
    return next(keeper.pid for keeper in standing() if keeper.name == name)


def test_run_trains_on_the_cluster_and_removes_it(cluster: Path, tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    with subprocess.Popen(
        _words("run", cluster, "--", sys.executable, script, "--lr", "0.1"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    total, seconds, *args = out.split()
    assert (total, args) == ("3.0", ["--lr", "0.1"])
    assert float(seconds) > 0.1, "1 MB each way at 40 Mbit/s takes 0.2 s"
    assert "2 hosts x 1 cpu + 1 serving host" in err and "network namespaces" in err
    await_nothing_left(process.pid)


def test_run_passes_a_failure_on(cluster: Path) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('enough')\ntime.sleep(600)"
    done = _lab("run", cluster, "--", sys.executable, "-c", script, check=False)
    assert done.returncode == 1
    assert "rank 1 on worker-1 ended with exit status 1; the others were ended\n  enough\n" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_run_ends_with_all_that_it_started(cluster: Path, number: signal.Signals, code: int) -> None:
    words = _words("run", cluster, "--", sys.executable, "-c", "import time; print('here\\n', end=''); time.sleep(600)")
    with subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=-1, stderr=-3, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert len(namespaces(process.pid)) == 4
        process.send_signal(number)
        assert process.wait(timeout=60) == code
    await_nothing_left(process.pid)


def test_a_lab_stands_until_it_is_taken_down(cluster: Path, name: str) -> None:
    up: dict[str, Any] = json.loads(_lab("up", cluster, "--json").stdout)
    keeper = _keeper(name)
    hosts = up["hosts"]
    assert up["name"] == name
    assert [(h["name"], h["ranks"], h["sends_bps"], h["receives_bps"]) for h in hosts] == [
        ("worker-0", [0], 40e6, 200e6),
        ("worker-1", [1], 40e6, 200e6),
        ("server", [], 500e6, 500e6),
    ]
    # Another lab that comes and goes leaves it alone, though it cleans up what has no owner.
    _lab("run", cluster, "--", "true")
    inside = subprocess.Popen(["ip", "netns", "exec", hosts[0]["namespace"], "sleep", "600"])
    shown = subprocess.run(["ip", "-n", hosts[0]["namespace"], "-o", "address"], capture_output=True, text=True)
    assert hosts[0]["address"] in shown.stdout

    again = _lab("up", cluster, check=False)
    assert again.returncode == 2
    assert f"a lab '{name}' is up: take it down with `autopar lab down {name}`" in again.stderr
    typo = _lab("down", name + "x", check=False)
    assert typo.returncode == 2
    assert f"did you mean '{name}'?" in typo.stderr

    assert _lab("down", name).stdout == f"lab '{name}' is removed\n"
    assert namespaces(keeper) == []
    assert inside.wait(timeout=10) == -signal.SIGKILL
    await_nothing_left(keeper)
    assert not runs(keeper)


def test_up_shows_how_to_enter(cluster: Path, name: str) -> None:
    done = _lab("up", cluster, "--scale", "0.5")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["host", "ranks", "address", "out", "in", "enter", "with"]
    assert "20 Mbit/s" in rows[0] and "100 Mbit/s" in rows[0]
    assert rows[0].endswith(f"ip netns exec autopar-{_keeper(name)}-0-worker-0 bash")
    assert "serves" in rows[2]
    assert "every rate times 0.5" in done.stderr


def test_a_keeper_that_is_killed_takes_its_lab_along(cluster: Path, name: str) -> None:
    _lab("up", cluster)
    keeper = _keeper(name)
    assert len(namespaces(keeper)) == 4
    os.kill(keeper, signal.SIGKILL)
    await_nothing_left(keeper)


@pytest.mark.parametrize("moment", [0, 1, 3])
def test_up_that_is_killed_leaves_nothing(cluster: Path, name: str, moment: int) -> None:
    """With so many namespaces there. A keeper detaches itself, so that for a moment there are two of its name."""
    keepers: set[int] = set()

    def there() -> bool:
        keepers.update(keeper.pid for keeper in standing() if keeper.name == name)
        return any(len(namespaces(pid)) >= moment for pid in keepers)

    def gone() -> bool:
        there()
        return not any(map(runs, keepers))

    with subprocess.Popen(_words("up", cluster), cwd=ROOT, env=environment(), stdout=-3, stderr=-3) as process:
        await_true(there, "the lab did not come up")
        process.kill()
    await_true(gone, "the keeper stays")
    for pid in [process.pid, *keepers]:
        await_nothing_left(pid)


def test_down_all_removes_what_has_no_owner(cluster: Path, name: str) -> None:
    _lab("up", cluster)
    keeper = _keeper(name)
    for pid in [int(line.split(":")[0]) for line in processes(keeper) if "watch_over" in line] + [keeper]:
        os.kill(pid, signal.SIGKILL)
    await_true(lambda: not runs(keeper), "the keeper stays")
    left = namespaces(keeper)
    assert len(left) == 4
    # Not `--all`, which would take down the labs of whoever else has one here.
    from autopar.lab import cleanup_stale

    assert set(left) <= set(cleanup_stale())
    assert namespaces(keeper) == []
