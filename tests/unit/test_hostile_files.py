"""Plans, clusters and calibrations that a fuzzer found to end otherwise than with a message, or late."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from autopar.errors import ClusterSpecError, PlanError, SpecError
from autopar.spec.calibration import Calibration, CollectiveTimes, DeviceRates, LinkTimes
from autopar.spec.cluster import ClusterSpec
from autopar.spec.complete import complete
from autopar.spec.plan import Plan
from tests.unit.plans import small_plan
from tests.unit.synthetic import cpu_hosts

CLUSTER = cpu_hosts(4)
Change = Callable[[dict[str, Any]], Any]


def plan_text(change: Change) -> str:
    data = json.loads(small_plan().model_copy(update={"cluster": CLUSTER.fingerprint}).model_dump_json())
    change(data)
    return json.dumps(data).replace('"HUGE"', "9" * 5000).replace('"LARGE"', "1e999")


def calibration_text(change: Change) -> str:
    made = Calibration(
        date="2026-11-23",
        hardware="none",
        versions={},
        cluster=CLUSTER.fingerprint,
        backend="gloo",
        collectives=(
            CollectiveTimes(
                kind="all_gather", teams=((0, 1), (2, 3)), size_bytes=(4096,), seconds=(0.1,), processor_s=(0.0,)
            ),
        ),
        links=(LinkTimes(sender=0, receiver=1, bytes_per_s=1e8, latency_s=1e-5),),
        devices=(
            DeviceRates(
                kind="cpu", flops_per_s={"float32": 1e10}, bytes_per_s=1e9, update_bytes_per_s=1e9, start_s=1e-6
            ),
        ),
    )
    data = json.loads(made.model_dump_json())
    change(data)
    return json.dumps(data)


def _parameter(**fields: Any) -> Change:
    return lambda d: d["model"]["parameters"][-1].update(fields)


PLANS: dict[str, tuple[Change, str]] = {
    "a number of 5,000 digits": (lambda d: d["prediction"].update(wire_bytes="HUGE"), "99999... is too large"),
    "a number beyond floats": (lambda d: d["prediction"].update(step_time_s="LARGE"), "1e999 is too large"),
    "NaN": (lambda d: d["prediction"].update(step_time_s=float("nan")), "NaN is no number"),
    "Infinity": (lambda d: d["prediction"].update(step_time_s=float("inf")), "Infinity is no number"),
    "half a character": (lambda d: d.update(name="\ud800"), r"'\\ud800' is half of a character"),
    "half a character in a key": (lambda d: d["cluster"]["spec"].update({"\udfff": 1}), "half of a character"),
    "2^62 ranks": (lambda d: d["cluster"].update(world_size=2**62), "cluster.world_size: .* 8192"),
    "a cluster that is none": (
        lambda d: d["cluster"]["spec"]["hosts"][0].update(count="many"),
        r"cluster.spec: ClusterSpec: hosts\[0\].count: 'many' is not possible",
    ),
    "a cluster of text": (lambda d: d["cluster"].update(spec={"self": 1}), "cluster.spec"),
    "another number of ranks": (
        lambda d: d["cluster"].update(world_size=3),
        "cluster.world_size is 3, but cluster.spec has 4 devices",
    ),
    "too many elements": (_parameter(shape=[2**40, 2**40]), "too many elements for a parameter"),
    "too many dimensions": (_parameter(shape=[1] * 1000), "at most 64 items"),
    "a negative size": (_parameter(shape=[-1, 4]), "greater than or equal to 0"),
    "a dtype of digits": (_parameter(dtype="9" * 5000), "at most 64 characters"),
    "a version of another type": (lambda d: d.update(schema_version=True), "schema version True"),
}


@pytest.mark.parametrize("what", PLANS)
def test_plans(what: str) -> None:
    change, said = PLANS[what]
    with pytest.raises(PlanError, match=said) as e:
        Plan.loads(plan_text(change))
    assert len(str(e.value).encode()) < 3000


def test_a_key_that_is_given_twice() -> None:
    text = small_plan().model_dump_json()
    with pytest.raises(PlanError, match="the key 'name' is given twice"):
        Plan.loads(text.replace('"name":', '"name":"other","name":', 1))


def test_a_long_name_makes_no_long_message() -> None:
    with pytest.raises(PlanError) as e:
        Plan.loads(plan_text(lambda d: d["groups"][0]["members"][0].update(name="x" * 100_000)))
    assert len(str(e.value)) < 2000


def _first(key: str, **fields: Any) -> Change:
    return lambda d: d[key][0].update(fields)


CALIBRATIONS: dict[str, tuple[Change, str]] = {
    "teams of ranks that are not there": (_first("collectives", teams=[[0, 1], [2, 10_000]]), "ranks 0 to 3 once"),
    "a rank in two teams": (_first("collectives", teams=[[0, 1], [1, 3]]), "ranks 0 to 3 once"),
    "a rank in no team": (_first("collectives", teams=[[0, 1]]), "ranks 0 to 3 once"),
    "a team of nobody": (_first("collectives", teams=[[0, 1, 2, 3], []]), "ranks 0 to 3 once"),
    "teams without the owner": (_first("collectives", kind="broadcast"), "it has an owner"),
    "no time": (_first("collectives", seconds=[1e-308]), "greater than or equal to"),
    "a link to nowhere": (_first("links", receiver=4), "a link from rank 0 to rank 4: the cluster has 4 ranks"),
    "a link to itself": (_first("links", receiver=0), "a link from rank 0 to rank 0"),
    "a rate of nothing": (_first("devices", flops_per_s={"float32": 0.0}), "greater than or equal to"),
    "a rate of everything": (_first("links", bytes_per_s=1e308), "less than or equal to"),
    "a factor of everything": (lambda d: d.update(two_at_once=1e308), "less than or equal to"),
    "a cluster that is none": (lambda d: d["cluster"].update(spec={"hosts": 3}), "cluster.spec"),
}


@pytest.mark.parametrize("what", CALIBRATIONS)
def test_calibrations(what: str) -> None:
    change, said = CALIBRATIONS[what]
    with pytest.raises(SpecError, match=said):
        Calibration.loads(calibration_text(change))


def test_the_calibration_that_was_changed_can_be_used() -> None:
    found = Calibration.loads(calibration_text(lambda d: None))
    assert complete(found.cluster.cluster, found) == CLUSTER


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts: [{name: a, count: 2000, devices: cpu}]\nnetwork: 1GbE", "2000 hosts .* at most 1024"),
        ("hosts: [{name: a, count: 1000, devices: 9 x cpu}]\nnetwork: 1GbE", "9000 devices are too many"),
        ("hosts: [{name: a, devices: cpu, memory: 1e99 GB}]", "too large or too small for a size"),
        ("hosts: [{name: a, devices: cpu}]\nnetwork: {latency: 1e-99 us}", "too large or too small for a duration"),
        ("hosts: {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}", "hosts"),
        (
            "hosts: [{name: a, devices: cpu}]\nnetwork: {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}",
            "more than 100 problems",
        ),
    ],
    ids=lambda x: x[:40],
)
def test_clusters(text: str, said: str) -> None:
    with pytest.raises(ClusterSpecError, match=said):
        ClusterSpec.loads(text)


def test_two_racks_with_two_ways_between_them_go_the_faster_one() -> None:
    """Where no one switch joins two hosts, and where two do."""
    from autopar.spec.topology import Topology

    found = Topology(
        ClusterSpec.loads(
            """
            hosts:
              - {name: a, devices: cpu, switch: left, bandwidth: 10 Gbit/s}
              - {name: b, devices: cpu, switch: right, bandwidth: 10 Gbit/s}
              - {name: c, devices: cpu, switch: right, bandwidth: 10 Gbit/s}
            network:
              switches: [left, right, slow, fast]
              bandwidth: 10 Gbit/s
              links:
                - {between: [left, slow], bandwidth: 1 Gbit/s}
                - {between: [slow, right], bandwidth: 1 Gbit/s}
                - {between: [left, fast]}
                - {between: [fast, right]}
                - {between: [b, fast]}
                - {between: [c, fast]}
            """
        )
    )
    ways = [[link.id for link in found.path(*ends)][1:-1] for ends in ((0, 1), (1, 2))]
    assert ways[0] == ["a->left", "left->fast", "fast->b"]
    assert ways[1] in (["b->right", "right->c"], ["b->fast", "fast->c"])
    assert [link.id for link in found.path(1, 0)][1:-1] == ["b->fast", "fast->left", "left->a"]
