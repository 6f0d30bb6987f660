"""The cluster that a process sees: its job under torchrun, its machine without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from autopar.cli.doctor import examine
from autopar.errors import ClusterSpecError
from autopar.lab.pool import Pool
from autopar.lab.trial import RealCompute
from autopar.runtime.operator_times import device_name
from autopar.spec.cluster import ClusterSpec
from autopar.spec.detect import cores, memory_bytes, threads_of_rank
from autopar.trials.measure import USED, Measure

ROOT = Path(__file__).parents[2]
UUIDS = ["GPU-1b6f0a5c-0000", "GPU-2c6f0a5c-0000"]


def detect(environment: dict[str, str], gpus: list[str] | None, tmp_path: Path, first: str = "") -> ClusterSpec:
    """`ClusterSpec.detect()` in a new process, on a machine whose `nvidia-smi` lists `gpus`."""
    tool = tmp_path / "nvidia-smi"
    if gpus is not None:
        lines = "\n".join(f"{i}, {UUIDS[i]}, {gpu}" for i, gpu in enumerate(gpus))
        tool.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n" if gpus else "#!/bin/sh\nexit 9\n")
        tool.chmod(0o755)
    program = (
        f"{first}\nimport json, sys\n"
        "from autopar.spec.cluster import ClusterSpec\n"
        "from autopar.errors import ClusterSpecError\n"
        "try: print(json.dumps(ClusterSpec.detect().description))\n"
        "except ClusterSpecError as e: print(json.dumps(str(e)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise ClusterSpecError(found)
    return ClusterSpec(**found)


def torchrun(hosts: int, local: int, **more: str) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(hosts * local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_WORLD_SIZE": str(hosts),
        "GROUP_RANK": "0",
        **more,
    }


@pytest.mark.parametrize("n", [1, 2, 4])
def test_local(n: int) -> None:
    cluster = ClusterSpec.local(n)
    assert (cluster.world_size, len(cluster.all_hosts)) == (n, 1)
    assert cluster.summary == (f"1 host x {n} cpu, loopback" if n > 1 else "1 host x 1 cpu")
    device = cluster.ranks[0].device
    page = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < device.memory_bytes.value * n <= page
    assert device.memory_bytes.provenance == "measured"
    assert device.flops_per_s().provenance == "guessed"
    assert ClusterSpec.loads(cluster.to_yaml()) == cluster


@pytest.mark.parametrize("n", [0, -1, True, "4", 2.0])
def test_local_needs_a_number_of_ranks(n: object) -> None:
    with pytest.raises(ClusterSpecError, match="expected a number of ranks from 1 on"):
        ClusterSpec.local(n)  # type: ignore[arg-type]


def test_local_ranks_share_the_cores() -> None:
    one, four = ClusterSpec.local(1).ranks[0].device, ClusterSpec.local(4).ranks[0].device
    assert float(one.flops_per_s()) == 4 * float(four.flops_per_s())


def test_this_machine_without_torchrun(tmp_path: Path) -> None:
    assert detect({}, None, tmp_path).summary == "1 host x 1 cpu"
    assert detect({}, [], tmp_path).summary == "1 host x 1 cpu"  # a driver that does not answer
    gpus = ["NVIDIA A100-SXM4-80GB, 81920"] * 2
    cluster = detect({}, gpus, tmp_path)
    assert cluster.summary == "1 host x 2 A100-80GB, NVLink3"
    assert cluster.ranks[0].device.memory_bytes.value == 80 * 2**30
    assert cluster.ranks[0].device.memory_bytes.provenance == "measured"


def test_unequal_and_unknown_gpus(tmp_path: Path) -> None:
    cluster = detect({}, ["Tesla T4, 15360", "NVIDIA Mystery 9 (x), 4096"], tmp_path)
    assert [p.device.kind for p in cluster.ranks] == ["T4", "NVIDIA-Mystery-9--x"]
    assert cluster.ranks[1].device.flops_per_s().provenance == "guessed"
    assert cluster.ranks[1].device.memory_bytes.value == 4 * 2**30


@pytest.mark.parametrize(
    ("visible", "kinds"),
    [
        ("0", ["T4"]),
        ("1,0", ["L4", "T4"]),
        ("", ["cpu"]),
        ("-1", ["cpu"]),
        ("0,7,1", ["T4"]),
        (UUIDS[1][:9], ["L4"]),
    ],
)
def test_only_visible_gpus_count(visible: str, kinds: list[str], tmp_path: Path) -> None:
    cluster = detect({"CUDA_VISIBLE_DEVICES": visible}, ["Tesla T4, 15360", "NVIDIA L4, 23034"], tmp_path)
    assert [p.device.kind for p in cluster.ranks] == kinds


def test_under_torchrun(tmp_path: Path) -> None:
    cluster = detect(torchrun(4, 2), None, tmp_path)
    assert cluster.world_size == 8
    assert [(p.host.name, p.local_rank) for p in cluster.ranks[:3]] == [("host-0", 0), ("host-0", 1), ("host-1", 0)]
    assert all((h.send_bytes_per_s or 0) > 0 for h in cluster.all_hosts)
    assert detect(torchrun(1, 3), None, tmp_path).summary == "1 host x 3 cpu, loopback"


def test_gpus_under_torchrun(tmp_path: Path) -> None:
    gpus = ["NVIDIA L4, 23034"] * 2
    assert [p.device.kind for p in detect(torchrun(2, 2), gpus, tmp_path).ranks] == ["L4"] * 4
    assert [p.device.kind for p in detect(torchrun(2, 1), gpus, tmp_path).ranks] == ["L4"] * 2
    # Fewer GPUs than ranks: these ranks are on the CPU.
    assert [p.device.kind for p in detect(torchrun(1, 3), gpus, tmp_path).ranks] == ["cpu"] * 3


def test_torch_is_believed_where_it_is_loaded(tmp_path: Path) -> None:
    # A torch that was told to see no GPU uses none, whatever the driver lists.
    hide = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; import torch"
    assert detect({}, ["NVIDIA L4, 23034"], tmp_path, hide).summary == "1 host x 1 cpu"


def test_other_launchers(tmp_path: Path) -> None:
    assert detect({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}, None, tmp_path).summary.startswith("3 hosts x 2 cpu")
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    assert detect(here, None, tmp_path).summary == "1 host x 3 cpu, loopback"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "three"}, "WORLD_SIZE is 'three', expected a whole number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "-2"}, "LOCAL_WORLD_SIZE is '-2'"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}, "LOCAL_WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}, "make 4 ranks, but WORLD_SIZE is 5"),
        (torchrun(2, 2, WORLD_SIZE="3"), "where hosts differ, describe the cluster in a file"),
        (torchrun(2, 2, GROUP_RANK="2"), "GROUP_RANK is '2', expected a host's number from 0 to 1"),
    ],
)
def test_contradictions_are_errors(environment: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterSpecError) as e:
        detect(environment, None, tmp_path)
    assert said in str(e.value)


def test_a_rank_computes_with_its_part_of_the_cores_unless_it_is_told() -> None:
    assert threads_of_rank(4, {"OMP_NUM_THREADS": "3"}) == "3"
    assert int(threads_of_rank(1, {})) >= int(threads_of_rank(2, {})) >= 1 == int(threads_of_rank(10_000, {}))


def limited(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """In a container with these limits, by the names of their files, on a machine with eight cores and 8 GiB free."""
    read = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    read["/proc/meminfo"] = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB"
    monkeypatch.setattr("autopar.spec.detect._read", lambda path: read.get(str(path), ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_a_container_has_as_many_cores_as_its_share_of_time(
    files: dict[str, str], usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, files)
    assert cores() == usable and threads_of_rank(1, {}) == str(usable)
    assert f", {usable} cores, " in device_name(torch.device("cpu"))
    assert {f.name: f.value for f in examine()}["cores"].startswith(f"{usable} usable of ")


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (
            {
                "memory.max": f"{1 << 30}",
                "memory.current": f"{3 << 28}",
                "memory.stat": f"a 7\ninactive_file {1 << 28}",
            },
            512,
        ),
        ({"memory/memory.limit_in_bytes": f"{1 << 30}", "memory/memory.usage_in_bytes": f"{1 << 30}"}, 0),
        ({"memory.max": "max"}, 8192),
    ],
)
def test_a_container_has_the_memory_of_its_limit(
    files: dict[str, str], free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free of it, in MiB, is what plans that are tried are kept in together."""
    limited(monkeypatch, files)
    whole = memory_bytes()
    assert whole is not None and (whole == 1 << 30) is (free < 8192)
    said = {f.name: f.value for f in examine()}["memory"]
    assert said == f"{free / 1024:.1f} GiB free of {whole / 2**30:.1f} GiB"

    class Ranks:
        def in_turn(self, *what: Any, **how: Any) -> dict[str, Any]:
            return {}

    asked: list[int] = []

    def fits(most: int) -> bool:
        asked.append(most)
        return True

    Measure(cast(Pool, Ranks()), RealCompute("nothing"), "here", one_machine=True)({}, fits, lambda: False, print)
    assert asked == [int(USED * (free << 20))]
