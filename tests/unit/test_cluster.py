"""Cluster descriptions: what they mean, how they are written, how they compare."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.spec.cluster import ClusterFingerprint, ClusterSpec, DeviceSpec, DuplexSpec, HostSpec, NetworkSpec
from autopar.spec.cluster_parts import InterconnectSpec, LinkSpec, PeakFlopsSpec, SwitchSpec
from autopar.spec.devices import DEVICES, DTYPES, LINKS, NETWORKS, device_of_product
from autopar.spec.units import Figure

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("cluster*.yaml"))

FOUR = """
hosts:
  - {name: worker, count: 4, devices: 1 x cpu}
network: {bandwidth: 1 Gbit/s, latency: 50 us}
"""


def test_equal_hosts_in_short() -> None:
    cluster = ClusterSpec.loads(FOUR)
    assert cluster.world_size == 4
    assert [h.name for h in cluster.all_hosts] == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert [(p.rank, p.host.name, p.local_rank, p.device.kind) for p in cluster.ranks] == [
        (r, f"worker-{r}", 0, "cpu") for r in range(4)
    ]
    assert cluster.summary == "4 hosts x 1 cpu, 1 Gbit/s"
    assert {h.send_bytes_per_s for h in cluster.all_hosts} == {125e6}
    assert cluster.serving_hosts == ()


def test_short_and_full_forms_mean_the_same() -> None:
    short = ClusterSpec.loads(
        """
        hosts:
          - {name: a, devices: 2 x A100-80GB, interconnect: NVLink3, bandwidth: 25 Gbit/s}
          - {name: b, devices: [L4], bandwidth: 25 Gbit/s}
        network: 100GbE
        """
    )
    full = ClusterSpec(
        hosts=(
            HostSpec(
                name="a",
                devices=(DeviceSpec(kind="A100-80GB", count=2),),
                interconnect=InterconnectSpec(kind="NVLink3"),
                bandwidth=DuplexSpec(send="25 Gbit/s", receive=Figure(25e9 / 8)),
            ),
            HostSpec(name="b", devices="1 x L4", bandwidth="25 Gbit/s"),
        ),
        network=NetworkSpec(kind="100GbE"),
    )
    assert short == full


def test_hosts_and_devices_differ() -> None:
    cluster = ClusterSpec.load(ROOT / "examples" / "cluster-mixed.yaml")
    assert cluster.world_size == 19
    assert cluster.summary == (
        "2 hosts x 8 A100-80GB + 1 host x (2 L4 + 1 T4) + 1 serving host, 10 Gbit/s to 200 Gbit/s"
    )
    small = cluster.ranks[18]
    assert (small.host.name, small.local_rank, small.device.kind) == ("small", 2, "T4")
    assert small.device.memory_bytes == Figure(14.6 * 2**30, "measured")
    assert small.device.flops_per_s("float16") == Figure(65e12, "looked up")
    assert (small.host.send_bytes_per_s, small.host.receive_bytes_per_s) == (10e9 / 8, 25e9 / 8)
    (server,) = cluster.serving_hosts
    assert (server.name, server.devices, server.memory_bytes.value) == ("server", (), 256 * 2**30)


@pytest.mark.parametrize("alone", ["devices: 0", "devices: []", "serves: true", "{devices: 0, serves: true}"])
def test_hosts_that_only_serve(alone: str) -> None:
    alone = alone.strip("{}")
    cluster = ClusterSpec.loads(f"hosts: [{{name: w, devices: cpu}}, {{name: s, {alone}}}]\nnetwork: 1GbE")
    assert cluster.world_size == 1
    assert [h.name for h in cluster.serving_hosts] == ["s"]
    assert ClusterSpec.loads(cluster.to_yaml()) == cluster


def test_a_host_with_devices_may_serve_too() -> None:
    cluster = ClusterSpec.loads("hosts: [{name: w, devices: cpu, serves: true}]")
    assert [h.name for h in cluster.serving_hosts] == ["w"]
    assert cluster.world_size == 1


def test_a_network_card_is_held_to_the_port() -> None:
    cluster = ClusterSpec.loads(
        "hosts: [{name: a, devices: cpu, bandwidth: 100 Gbit/s}, {name: b, devices: cpu, bandwidth: 200 Mbit/s}]\n"
        "network: {bandwidth: 1 Gbit/s (measured)}"
    )
    a, b = cluster.all_hosts
    assert (a.send_bytes_per_s, b.send_bytes_per_s) == (125e6, 25e6)
    assert a.cable is not None and a.cable.forth_bytes_per_s.provenance == "measured"
    assert cluster.summary == "2 hosts x 1 cpu, 200 Mbit/s to 1 Gbit/s"


def test_a_device_of_another_kind_needs_all_figures() -> None:
    device = DeviceSpec(kind="NPU 3", memory="32 GiB", memory_bandwidth="1 TB/s", peak_flops="100 TFLOP/s")
    cluster = ClusterSpec(hosts=(HostSpec(name="a", devices=(device,)),))
    peak = cluster.ranks[0].device.peak_flops
    assert {float(peak.of(d)) for d in DTYPES} == {100e12}
    assert peak.of("float32").provenance == "looked up"


def test_missing_number_formats_are_guessed_from_those_given() -> None:
    peak = PeakFlopsSpec(float32="10 TFLOP/s", bfloat16="80 TFLOP/s")
    device = DeviceSpec(kind="NPU", memory="32 GiB", memory_bandwidth="1 TB/s", peak_flops=peak)
    found = ClusterSpec(hosts=(HostSpec(name="a", devices=(device,)),)).ranks[0].device
    assert found.flops_per_s("float16") == Figure(80e12, "guessed")
    assert found.flops_per_s("float64") == Figure(5e12, "guessed")
    assert found.flops_per_s("int64") == Figure(10e12, "guessed")


@pytest.mark.parametrize("kind", DEVICES)
def test_every_device_of_the_library_can_be_named(kind: str) -> None:
    found = ClusterSpec.loads(f"hosts: [{{name: a, devices: 2 x {kind}}}]").ranks[1].device
    entry = DEVICES[kind]
    assert (found.memory_bytes, found.peak_flops) == (entry.memory_bytes, entry.peak_flops)
    assert entry.interconnect in LINKS and entry.host_link in LINKS and entry.source
    guesses = {"cpu", "gpu"}
    assert (found.memory_bytes.provenance == "guessed") == (kind in guesses)
    # A short format is never slower than float32, nor float64 faster.
    assert float(entry.peak_flops.float16) >= float(entry.peak_flops.float32) >= float(entry.peak_flops.float64)


def test_products_are_found_by_the_names_that_drivers_use() -> None:
    for product, kind in [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ]:
        found = device_of_product(product)
        assert found is not None and found.name == kind
    assert device_of_product("NVIDIA A100-SXM4-79GB") is None
    products = [p for k in DEVICES.values() for p in k.products]
    assert len(products) == len(set(products))


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_network_of_the_library_can_be_named(kind: str) -> None:
    cluster = ClusterSpec.loads(f"hosts: [{{name: a, count: 2, devices: cpu}}]\nnetwork: {kind}")
    assert {h.send_bytes_per_s for h in cluster.all_hosts} == {NETWORKS[kind].bytes_per_s.value}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_round_trip(path: Path) -> None:
    cluster = ClusterSpec.load(path)
    again = ClusterSpec.loads(cluster.to_yaml())
    assert again == cluster
    assert again.to_yaml() == cluster.to_yaml()
    assert again.fingerprint == cluster.fingerprint
    assert len(EXAMPLES) == 2


def test_a_fingerprint_holds_the_whole_cluster() -> None:
    cluster = ClusterSpec.load(ROOT / "examples" / "cluster-mixed.yaml")
    fingerprint = ClusterFingerprint.model_validate_json(cluster.fingerprint.model_dump_json())
    assert fingerprint == cluster.fingerprint
    assert (fingerprint.world_size, fingerprint.summary) == (19, cluster.summary)
    assert ClusterSpec(**fingerprint.spec) == cluster


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("1 Gbit/s", "2 Gbit/s"),
            [
                f"the cable from 'worker-{i}' to 'switch': {which} 1 Gbit/s, in the other cluster 2 Gbit/s"
                for i in range(4)
                for which in ("rate", "rate back")
            ],
        ),
        (("count: 4", "count: 3"), ["host 'worker-3' is only in this cluster"]),
        (("count: 4", "count: 5"), ["host 'worker-4' is only in the other cluster"]),
        (
            ("1 x cpu", "2 x T4"),
            [f"host 'worker-{i}': devices 1 x cpu, in the other cluster 2 x T4" for i in range(4)],
        ),
        (
            ("1 x cpu", "{kind: cpu, memory: 7 GiB}"),
            [f"host 'worker-{i}': device memory 8 GiB, in the other cluster 7 GiB" for i in range(4)],
        ),
        (
            ("1 x cpu", "1 x cpu, serves: true"),
            [f"host 'worker-{i}': serves false, in the other cluster true" for i in range(4)],
        ),
    ],
)
def test_differences_in_words(change: tuple[str, str], said: list[str]) -> None:
    one, other = ClusterSpec.loads(FOUR), ClusterSpec.loads(FOUR.replace(*change))
    assert one.difference(other) == said
    assert one.fingerprint.digest != other.fingerprint.digest


@pytest.mark.parametrize(
    "change",
    [
        ("name: worker", "name: node"),
        ("1 Gbit/s", "1 Gbit/s (measured)"),
        ("latency: 50 us", "latency: 0.05 ms (guessed)"),
        ("{bandwidth: 1 Gbit/s, latency: 50 us}", "{kind: 1GbE, latency: 50 us, switches: [rack]}"),
        ("count: 4, devices: 1 x cpu", "count: 4, bandwidth: 1 Gbit/s, devices: [{kind: cpu, memory: 8 GiB}]"),
    ],
)
def test_what_changes_no_plan_changes_no_digest(change: tuple[str, str]) -> None:
    one, other = ClusterSpec.loads(FOUR), ClusterSpec.loads(FOUR.replace(*change))
    assert one != other
    assert one.difference(other) == []
    assert one.fingerprint.digest == other.fingerprint.digest


def test_anchors_and_merge_keys() -> None:
    cluster = ClusterSpec.loads(
        """
        hosts:
          - &host {name: a, devices: 2 x cpu, bandwidth: &rate 1 Gbit/s}
          - {<<: *host, name: b, bandwidth: 200 Mbit/s}
          - {name: c, devices: cpu, bandwidth: *rate}
        """
    )
    assert [(h.name, len(h.devices), h.send_bytes_per_s) for h in cluster.all_hosts] == [
        ("a", 2, 125e6),
        ("b", 2, 25e6),
        ("c", 1, 125e6),
    ]


def test_documentation_names_every_key_and_kind_and_its_file_loads() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    models = (HostSpec, DeviceSpec, InterconnectSpec, NetworkSpec, SwitchSpec, LinkSpec, ClusterSpec, PeakFlopsSpec)
    for key in {key for model in models for key in model.model_fields}:
        assert re.search(rf"`{key}[:`]", page), key
    for kind in [*DEVICES, *NETWORKS, *(LINKS.keys() - {"memory"})]:
        assert f"`{kind}`" in page, kind
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert ClusterSpec.loads(block).summary == "4 hosts x 1 cpu, 1 Gbit/s"
    assert ClusterSpec.loads(block) == ClusterSpec.load(ROOT / "examples" / "cluster.yaml")


def test_loads_neither_torch_nor_networkx() -> None:
    program = (
        "import sys; from autopar.spec.cluster import ClusterSpec; "
        f"ClusterSpec.loads({FOUR!r}).fingerprint; ClusterSpec.local(2).to_yaml(); ClusterSpec.detect(); "
        "sys.exit(', '.join({'torch', 'networkx', 'numpy'} & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
