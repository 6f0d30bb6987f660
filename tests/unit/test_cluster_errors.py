"""What is wrong with a cluster description is said with file, line, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ClusterSpecError, SpecError
from autopar.spec.cluster import ClusterSpec, DeviceSpec, HostSpec
from autopar.spec.units import Figure

TWO = "hosts:\n  - {name: a, devices: cpu}\n  - {name: b, devices: cpu}\nnetwork: 10GbE\n"
RACKS = """hosts:
  - {name: a, devices: cpu, switch: left}
  - {name: b, devices: cpu, switch: right}
network:
  bandwidth: 1 Gbit/s
  switches: [left, right]
"""


def message(text: str) -> str:
    with pytest.raises(ClusterSpecError) as e:
        ClusterSpec.loads(text, "cluster.yaml")
    return str(e.value)


def test_the_file_with_both_hosts_is_right() -> None:
    assert ClusterSpec.loads(TWO).world_size == 2


def test_a_misspelt_key_exactly() -> None:
    text = "\n\n\n\n\n\nhosts:\n  - name: a\n    bandwith: 1 Gbit/s\n    devices: cpu\n"
    assert message(text) == "cluster.yaml:9: hosts[0].bandwith is not a field of a host; did you mean 'bandwidth'?"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Keys
        (
            "hots: []\nhosts: [{name: a, devices: cpu}]",
            "cluster.yaml:1: hots is not a field of a cluster; did you mean 'hosts'?",
        ),
        (
            "hosts: [{name: a, devices: cpu}]\nzzz: 1",
            "cluster.yaml:2: zzz is not a field of a cluster; its fields are hosts, network",
        ),
        (
            "hosts:\n - {name: a, devices: {kind: T4, memry: 1 GB}}",
            "cluster.yaml:2: hosts[0].devices[0].memry is not a field of a device; did you mean 'memory'?",
        ),
        (
            "hosts:\n - name: a\n   devices:\n    - cpu\n    - kind: T4\n      cout: 1",
            "cluster.yaml:6: hosts[0].devices[1].cout is not a field of a device; did you mean 'count'?",
        ),
        (
            "hosts:\n - name: a\n   devices:\n     kind: T4\n     batch: 0",
            "cluster.yaml:5: hosts[0].devices.batch: 0 is not possible; expected a whole number from 1",
        ),
        (
            "hosts: [{name: a, devices: cpu, bandwidth: {send: 1 Gbit/s, recieve: 1 Gbit/s}}]",
            "cluster.yaml:1: hosts[0].bandwidth.recieve is not a field of a bandwidth; did you mean 'receive'?",
        ),
        ("hosts:\n - devices: cpu", "cluster.yaml:2: hosts[0].name is missing: a host needs it"),
        (
            "hosts:\n - {nmae: a, devices: cpu}",
            "cluster.yaml:2: hosts[0].nmae is not a field of a host; did you mean 'name'?",
        ),
        ("network: 1GbE", "cluster.yaml:1: hosts is missing: a cluster needs it"),
        ("hosts: [{name: a, devices: cpu}]\nhosts: []", "cluster.yaml:2: 'hosts' is given twice, first in line 1"),
        # Units and numbers
        (
            "hosts:\n - {name: a, devices: cpu,\n    bandwidth: 25}",
            "cluster.yaml:3: hosts[0].bandwidth: 25 has no unit; write for example '25 Gbit/s' (units: bit/s",
        ),
        (
            "hosts:\n - {name: a, devices: cpu, bandwidth: 25 Gbots/s}",
            "hosts[0].bandwidth: '25 Gbots/s': 'Gbots/s' is no unit of data rate; did you mean 'Gbit/s'?",
        ),
        (
            "hosts:\n - {name: a, devices: cpu, bandwidth: {send: 1 Gbit/s, receive: 25 us}}",
            "cluster.yaml:2: hosts[0].bandwidth.receive: '25 us': 'us' is a unit of duration, not of data rate",
        ),
        (
            "hosts:\n - {name: a, devices: cpu, bandwidth: -1 Gbit/s}",
            "cluster.yaml:2: hosts[0].bandwidth: '-1 Gbit/s' is not possible: a data rate here is more than zero",
        ),
        (
            "hosts:\n - {name: a, devices: cpu, bandwidth: 0 Gbit/s}",
            "cluster.yaml:2: hosts[0].bandwidth: '0 Gbit/s' is not possible",
        ),
        (
            "hosts: [{name: a, devices: cpu}]\nnetwork:\n  latency: 5",
            "cluster.yaml:3: network.latency: 5 has no unit; write for example '5 us' (units: s, ms, us, ns)",
        ),
        (
            "hosts:\n - {name: a, devices: {kind: T4, memory: 16}}",
            "cluster.yaml:2: hosts[0].devices.memory: 16 has no unit; write for example '80 GiB'",
        ),
        (
            "hosts:\n - {name: a, devices: {kind: T4, peak_flops: 8 TB/s}}",
            "'TB/s' is a unit of data rate, not of compute rate",
        ),
        (
            "hosts:\n - {name: a, devices: cpu, count: 0}",
            "cluster.yaml:2: hosts[0].count: 0 is not possible; expected a whole number from 1 to",
        ),
        ("hosts:\n - {name: a, devices: cpu, count: 2.0}", "hosts[0].count: 2.0 is not possible"),
        ("hosts:\n - {name: a, devices: cpu, count: two}", "hosts[0].count: 'two' is not possible"),
        ("hosts:\n - {name: a, devices: cpu, count: yes}", "hosts[0].count: True is not possible"),
        (
            "hosts:\n - {name: a, devices: 0 x cpu}",
            "hosts[0].devices: 0 is not possible; expected a whole number from 1",
        ),
        ("hosts:\n - {name: a, devices: cpu, serves: maybe}", "hosts[0].serves: 'maybe' is neither true nor false"),
        (
            "hosts:\n - {name: a, devices: cpu, count: 10000}\n - {name: b, devices: cpu}",
            "cluster.yaml:1: hosts: 10001 hosts with 10001 devices are too many",
        ),
        # Kinds
        (
            "hosts:\n - {name: a, devices: 8 x A100-80Gb}",
            "cluster.yaml:2: hosts[0].devices: 'A100-80Gb' is not in the library; did you mean 'A100-80GB'?",
        ),
        (
            "hosts:\n - {name: a, devices: {kind: abacus, memory: 1 GB}}",
            "Of other kinds, give its memory, memory_bandwidth and peak_flops",
        ),
        (
            "hosts:\n - {name: a, devices: 2 x cpu, interconnect: NVLnk3}",
            "cluster.yaml:2: hosts[0].interconnect: 'NVLnk3' is not in the library; did you mean 'NVLink3'?",
        ),
        (
            "hosts: [{name: a, devices: cpu}]\nnetwork: 26GbE",
            "cluster.yaml:2: network: '26GbE' is not in the library; did you mean",
        ),
        ("hosts:\n - {name: a, devices: {kind: [1]}}", "hosts[0].devices.kind: [1] is no kind"),
        # Hosts
        ("", "cluster.yaml:1: there is nothing in it; write for example:"),
        ("# only a remark\n", "cluster.yaml:1: there is nothing in it"),
        ("hosts: []", "cluster.yaml:1: hosts: the list is empty; a cluster has at least one host"),
        ("hosts:", "cluster.yaml:1: hosts: None is not a list"),
        ("- a", "cluster.yaml:1: a list is no cluster"),
        ("seven", "cluster.yaml:1: a single value is no cluster"),
        (
            "hosts:\n  name: a\n  devices: cpu",
            "hosts: {'name': 'a', 'devices': 'cpu'} is not a list; begin each entry with '- '",
        ),
        ("hosts: [worker]", "cluster.yaml:1: hosts[0]: 'worker' is not a host; its fields are name, count, devices"),
        (
            "hosts:\n - name: a",
            "cluster.yaml:2: hosts[0]: the host has no devices; write for example 'devices: 2 x cpu'",
        ),
        (
            "hosts:\n - {name: a, devices: 2}",
            "cluster.yaml:2: hosts[0].devices: 2 does not say of what kind; write for example '2 x cpu'",
        ),
        ("hosts:\n - {name: a, devices: 0, serves: false}", "the host has no devices and does not serve"),
        ("hosts:\n - {name: a, serves: true}", "cluster.yaml:1: hosts: no host has a device, so there is no rank"),
        (
            "hosts:\n - {name: a, devices: cpu}\n - {name: a, devices: cpu}\nnetwork: 1GbE",
            "cluster.yaml:3: hosts[1].name: 'a' is the name of hosts[0] already",
        ),
        (
            "hosts:\n - {name: a, count: 2, devices: cpu}\n - {name: a-1, devices: cpu}\nnetwork: 1GbE",
            "cluster.yaml:3: hosts[1].name: 'a-1' is the name of hosts[0] already",
        ),
        ("hosts:\n - {name: a b, devices: cpu}", "cluster.yaml:2: hosts[0].name: 'a b' is no name"),
        (
            "hosts:\n - {name: 7, devices: cpu}",
            "beginning with a letter or digit; if it is meant as text, put quotes around it",
        ),
        (
            "hosts:\n - {name: switch, count: 1, devices: cpu}\n - {name: b, devices: cpu}\nnetwork: 1GbE",
            "cluster.yaml:2: hosts[0].name: 'switch' is what the switch is called",
        ),
        # Networks
        (
            "hosts:\n - {name: a, count: 2, devices: cpu}",
            "cluster.yaml:2: hosts[0]: host 'a' has no bandwidth; write for example 'bandwidth: 1 Gbit/s' here, or",
        ),
        (RACKS, "cluster.yaml:4: network: host 'a' cannot reach host 'b'"),
        (
            RACKS.replace("switch: right", "switch: rigth"),
            "cluster.yaml:3: hosts[1].switch: the network has no switch 'rigth'; did you mean 'right'?",
        ),
        (
            RACKS.replace(", switch: right", ""),
            "cluster.yaml:3: hosts[1]: host 'b' is not in the network; give its switch, one of left, right",
        ),
        (
            RACKS.replace("[left, right]", "[left, right, left]"),
            "network.switches[2]: 'left' is the name of network.switches[0] already",
        ),
        (
            RACKS.replace("[left, right]", "[left, right, a]"),
            "network.switches[2]: 'a' is the name of hosts[0] already",
        ),
        (
            TWO.replace("cpu}", "cpu, switch: rack}", 1),
            "cluster.yaml:2: hosts[0].switch: the network has no switch 'rack'; list it in network.switches",
        ),
        (
            RACKS + "  links: [{between: [left, rigth]}]",
            "cluster.yaml:7: network.links[0].between: 'rigth' is unknown; did you mean 'right'?",
        ),
        (RACKS + "  links: [{between: [left, left]}]", "network.links[0].between: the link joins 'left' to itself"),
        (
            RACKS + "  links: [{between: left}]",
            "network.links[0].between: 'left' does not name two ends; expected for example [rack-0, core]",
        ),
        (
            RACKS + "  links:\n  - {between: [left, right]}\n  - {between: [right, left]}",
            "cluster.yaml:9: network.links[1].between: joins the same two as network.links[0]",
        ),
        (
            RACKS + "  links: [{between: [left, right]}, {between: [a, left]}]",
            "network.links[1].between: 'a' and 'left' are joined already",
        ),
        (
            "hosts: [{name: a, devices: cpu}, {name: b, devices: cpu}]\nnetwork:\n  links: [{between: [a, b]}]",
            "cluster.yaml:3: network.links[0]: the link has no bandwidth",
        ),
        # Not YAML, or more than YAML
        ("hosts:\n - {name: a\nb: 1", "cluster.yaml:3: not YAML: while parsing a flow mapping"),
        (
            "hosts:\n\t- a",
            "that cannot start any token (indent with spaces, not tabs)",
        ),
        ("a: 1\n---\nb: 2", "cluster.yaml:2: not YAML: expected a single document"),
        ("a: *nothing", "cluster.yaml:1: not YAML: found undefined alias"),
        ("a:\n  - \x00", "cluster.yaml:2: not YAML: the character 0 is not allowed"),
        ("hosts: 2024-01-01", "cluster.yaml:1: '2024-01-01' is a date in YAML; put quotes around it"),
        ("1: 2", "cluster.yaml:1: '1' is used as a field's name; names are words"),
        ("? [a]\n: b", "cluster.yaml:1: a list or mapping is used as a field's name"),
        ("<<: 3", "cluster.yaml:1: '<<' takes a mapping"),
    ],
)
def test_says_where_and_what(text: str, said: str) -> None:
    found = message(text)
    assert said in found
    assert found.startswith("cluster.yaml:")


def test_reports_all_problems_in_the_order_of_the_file() -> None:
    text = "hosts:\n - name: a\n   devices: 2 x cpo\n   bandwith: 3\n - name: b b\n   devices: cpu\nnetwrk: 1\n"
    lines = message(text).splitlines()
    assert lines[0] == "4 problems in cluster.yaml:"
    assert [line.split(" ")[0] for line in lines[1:]] == [f"cluster.yaml:{n}:" for n in (3, 4, 5, 7)]


def test_reports_at_most_ten() -> None:
    lines = message("hosts:\n" + " - {name: a, devices: cpu, speed: 1}\n" * 25).splitlines()
    assert lines[0] == "25 problems in cluster.yaml:"
    assert len(lines) == 12
    assert lines[-1] == "... and 15 more"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: !!python/object/apply:os.system ['touch owned']", "the tag"),
        ("!!python/object:autopar.Plan {}", "the tag"),
        ("a: !!binary aGk=", "the tag"),
        ("a: !mine x", "the tag"),
        ("a: &a [*a]", "expand without bound"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)),
            "expand without bound",
        ),
        (
            "a: &a {x: 1}\n"
            + "".join(
                f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{', '.join(['*' + chr(97 + i)] * 9)}]}}\n" for i in range(20)
            ),
            "expand without bound",
        ),
        ("[" * 500_000, "nested more than"),
        ("- " * 400_000, "nested more than"),
        ("[" + "a," * 100_000 + "]", "more than 20000 values"),
        ("a: " + "1:" * 400_000 + "1", "more than 1000 characters"),
        ("a: " + "9" * 800_000, "more than 1000 characters"),
        ("#" * (1 << 20) + "\na: 1", "larger than 1 MiB"),
        ("hosts: [{name: a, count: " + "9" * 900 + ", devices: cpu}]", "is not possible"),
        ("hosts: [{name: a, count: 10000, devices: 1000 x cpu}]", "too many"),
        ("hosts: [{name: a, devices: cpu, bandwidth: 1" + "0" * 900 + " Gbit/s}]", "no number"),
    ],
    ids=lambda v: v[:30] if isinstance(v, str) else "",
)
def test_hostile_files_are_refused_soon(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = message(text)
    assert said in found
    assert len(found) < 500
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content, said in [
        ("none.yaml", None, "No such file"),
        ("latin.yaml", b"hosts:\n - name: caf\xe9\n", "latin.yaml:2: not UTF-8 text: byte 0xe9 in it"),
        ("large.yaml", b"#" * (1 << 20) + b"\n\n", "larger than 1 MiB"),
    ]:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ClusterSpecError, match=r".") as e:
            ClusterSpec.load(path)
        assert said in str(e.value) and name in str(e.value)
    with pytest.raises(ClusterSpecError, match="directory"):
        ClusterSpec.load(tmp_path)


def test_windows_files_are_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + TWO.replace("\n", "\r\n").encode())
    assert ClusterSpec.load(path).world_size == 2
    path.write_bytes(TWO.replace("\n", "\r\n").replace("cpu", "cpo").encode())
    with pytest.raises(ClusterSpecError, match=r"cluster.yaml:2: hosts\[0\].devices: 'cpo'"):
        ClusterSpec.load(path)


def test_python_complains_in_the_same_words() -> None:
    with pytest.raises(ClusterSpecError) as e:
        HostSpec(name="a", devices="2 x cpo")
    assert str(e.value).startswith("HostSpec: devices[0]: 'cpo' is not in the library; did you mean 'cpu'?")
    with pytest.raises(ClusterSpecError) as e:
        ClusterSpec(hosts=[{"name": "a", "devices": "cpu", "bandwith": 1}, {"name": 3}])
    lines = str(e.value).splitlines()
    assert lines[0] == "2 problems in ClusterSpec:"
    assert "ClusterSpec: hosts[0].bandwith is not a field of a host; did you mean 'bandwidth'?" in lines
    with pytest.raises(ClusterSpecError, match="more than zero"):
        DeviceSpec(kind="cpu", memory=Figure(0.0))
    with pytest.raises(ClusterSpecError, match="ClusterSpec: hosts: the list is empty") as e:
        ClusterSpec(hosts=())
    assert isinstance(e.value, SpecError) and isinstance(e.value, ValueError)


def test_descriptions_do_not_change() -> None:
    cluster = ClusterSpec.loads(TWO)
    with pytest.raises(ValueError, match="frozen"):
        setattr(cluster, "hosts", ())  # noqa: B010
    assert hash(cluster) == hash(ClusterSpec.loads(TWO))
