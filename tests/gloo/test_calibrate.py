"""A calibration of real ranks: everything is measured, all ranks have the same, and predictions rest on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar import Calibration, ClusterSpec
from autopar.calibration import KINDS, _Bench, calibrate
from autopar.cost_models.calibrated import measured
from autopar.cost_models.network import Network
from autopar.spec.topology import Topology
from tests.gloo.ranks import run_ranks

TWO_HOSTS = "hosts: [{name: host, count: 2, devices: 2 x cpu}]\nnetwork: {bandwidth: 1 Gbit/s}"
FAST_HOSTS = """
hosts: [{name: host, count: 2, devices: 2 x cpu, interconnect: {kind: loopback, bandwidth: 1000 GB/s}}]
network: {bandwidth: 8000 Gbit/s}
"""
"""The same ranks, on links that no machine reaches. Loopback is faster than the 1 Gbit/s above, and where the machine
has other work, the few messages that tell how fast the links are may all be slow. The model holds collectives to the
fastest link that it knows of, and would then not believe those that nothing has slowed down."""


def calibrated(rank: int, world_size: int) -> str:
    return calibrate(ClusterSpec.loads(TWO_HOSTS), time_budget_s=1.0).model_dump_json()


def left_alone(rank: int, world_size: int) -> str:
    """What a rank hears where rank 1 ends between two collectives that the ranks measure."""

    def ends(self: _Bench, issue: object) -> tuple[float, float]:
        self._meet()
        raise ValueError("a fault of rank 1's own")

    if rank == 1:
        _Bench._once = ends  # type: ignore[method-assign]
    try:
        calibrate(ClusterSpec.local(2), time_budget_s=1.0, timeout_s=10.0)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


@pytest.fixture(scope="module")
def found() -> Calibration:
    texts = run_ranks(4, calibrated)
    assert len(set(texts)) == 1
    return Calibration.loads(texts[0])


def test_everything_is_measured(found: Calibration) -> None:
    everyone = [times.kind for times in found.collectives if not times.teams]
    assert sorted(everyone) == sorted(KINDS)
    of_teams = {(times.kind, times.teams) for times in found.collectives if times.teams}
    inner, outer = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert of_teams == {("reduce_scatter", inner), ("all_gather", inner), ("all_reduce", outer)}
    for times in found.collectives:
        assert times.size_bytes[0] <= 4096 and times.size_bytes[-1] >= 0.99 * 2**20
        assert len(times.size_bytes) >= 5 and min(times.seconds) > 0
    assert [(link.sender, link.receiver) for link in found.links] == [(0, 2), (2, 0)]
    (device,) = found.devices
    assert device.kind == "cpu"
    assert device.flops_per_s.keys() == {"float32", "bfloat16"}
    assert found.two_at_once is not None and found.compute_beside is not None
    assert found.compute_at_once is not None
    assert any(times.core_wait_s for times in found.collectives)
    assert "gloo" in found.backend and found.took_s > 0


def test_the_cost_model_says_what_was_measured(found: Calibration) -> None:
    network = Network(Topology(ClusterSpec.loads(FAST_HOSTS)), calibration=found)
    for times in found.collectives:
        for size, seconds in zip(times.size_bytes, times.seconds, strict=True):
            assert network.transfer(measured(times, size, 4)).seconds == pytest.approx(seconds, rel=1e-6)


def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "calibrate", "--cluster", "local:2", "--time-budget", "1", "-o", str(path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["collective", "all-reduce", "reduce-scatter"]
    assert "measuring links" in done.stderr and f"wrote {path}" in done.stderr
    assert Calibration.load(path).cluster == ClusterSpec.local(2).fingerprint
    assert json.loads(path.read_text())["schema_version"] == 1


def test_a_rank_that_ends_is_named() -> None:
    heard, fault = run_ranks(2, left_alone)
    assert heard.startswith("CollectiveError: a calibration, rank 0: rank 1 has ")
    assert fault == "ValueError: a fault of rank 1's own"


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(autopar.AutoparError, match="this job has 1 ranks"):
        calibrate(ClusterSpec.local(2))
