"""A calibration: kept as JSON, refused for another cluster, and believed by the cost model."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar.calibration as calibrating
from autopar.calibration import _Bench
from autopar.cost_models import AnalyticCostModel
from autopar.cost_models.calibrated import measured
from autopar.cost_models.compute import is_cpu
from autopar.cost_models.network import Network, backend_of
from autopar.errors import SpecError
from autopar.ops.measured import collective_named
from autopar.runtime.job.process_group import Group
from autopar.search import build_plan
from autopar.spec.calibration import Calibration, CollectiveTimes, DeviceRates, LinkTimes
from autopar.spec.cluster import ClusterSpec
from autopar.spec.topology import Topology
from autopar.strategies import Context
from tests.unit.synthetic import cpu_hosts, training_graph

CLUSTER = cpu_hosts(4, devices="1 x cpu")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


def calibration(factor: float = 1.0) -> Calibration:
    """All-reduces that take `factor` times as long as the cluster's figures say."""
    network = Network(Topology(CLUSTER))
    draft = CollectiveTimes(kind="all_reduce", size_bytes=SIZES, seconds=(1.0,) * 4, processor_s=(0.0,) * 4)
    seconds = tuple(factor * network.transfer(measured(draft, size, 4)).seconds for size in SIZES)
    return Calibration(
        date="2026-11-21 12:00",
        hardware="none",
        versions={},
        cluster=CLUSTER.fingerprint,
        backend="gloo",
        collectives=(draft.model_copy(update={"seconds": seconds}),),
    )


def test_it_is_kept_as_json(tmp_path: Path) -> None:
    kept = calibration()
    kept.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == kept
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(SpecError, match="is no calibration; write it again with `autopar calibrate`"):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(SpecError, match="as many times as sizes"):
        Calibration.loads(kept.model_dump_json().replace('"seconds":[', '"seconds":[1.0,'))


def test_it_is_refused_for_another_cluster() -> None:
    with pytest.raises(SpecError, match="another cluster: 4 hosts"):
        calibration().check_cluster(cpu_hosts(3).fingerprint)
    calibration().check_cluster(CLUSTER.fingerprint)
    larger = ClusterSpec.loads(
        "hosts: [{name: h, count: 4, devices: {kind: cpu, memory: 3 GiB}}]\nnetwork: {bandwidth: 1 Gbit/s}"
    )
    assert larger.summary == CLUSTER.summary
    with pytest.raises(SpecError, match=r"this one .*host 'h-0': device memory 3 GiB, in the other cluster 8 GiB;"):
        calibration().check_cluster(larger.fingerprint)


@pytest.mark.parametrize("size", [*SIZES, 300 << 10, 100, 256 << 20])
def test_what_was_measured_is_believed_and_carried_over(size: int) -> None:
    """To sizes between and beyond, and to collectives that were not measured."""
    plain, known = Network(Topology(CLUSTER)), Network(Topology(CLUSTER), calibration=calibration(1.5))
    assert known.provenance == "measured" != plain.provenance
    for kind in ("all_reduce", "broadcast"):
        call = collective_named(kind, size // 4, 4)
        ratio = known.transfer(call).seconds / plain.transfer(call).seconds
        assert ratio == pytest.approx(1.5, rel=1e-6)
        assert known.transfer(call).loads == pytest.approx(plain.transfer(call).loads)


def test_what_was_measured_to_keep_a_processor_is_what_compute_beside_it_loses() -> None:
    """Whatever the collective took of the time."""
    plain = Network(Topology(CLUSTER))
    given = calibration(2.0)
    seconds = [t.taken[0] * t.seconds for t in (plain.transfer(measured(given.collectives[0], s, 4)) for s in SIZES)]
    cores = plain.hosts[0].bytes_per_s / plain.backend.host_bytes_per_s
    thrice = given.collectives[0].model_copy(update={"processor_s": tuple(3 * cores * s for s in seconds)})
    known = Network(Topology(CLUSTER), calibration=given.model_copy(update={"collectives": (thrice,)}))
    for size, alone_s in zip(SIZES[2:], seconds[2:], strict=True):
        transfer = known.transfer(measured(thrice, size, 4))
        assert transfer.taken[0] * transfer.seconds == pytest.approx(3 * alone_s, rel=0.05)


def test_cores_that_ranks_share_lose_more_to_a_transfer_and_let_it_wait() -> None:
    """Collectives that were not measured wait as an all-reduce does."""
    given = calibration()
    waiting = given.collectives[0].model_copy(update={"core_wait_s": 0.05})
    shared = given.model_copy(update={"compute_at_once": 1.5, "collectives": (waiting,)})
    own, known = (Network(Topology(CLUSTER), calibration=c) for c in (given, shared))
    for kind in ("all_reduce", "broadcast"):
        call = collective_named(kind, 1 << 20, 4)
        before, after = own.transfer(call), known.transfer(call)
        assert [part * (after.seconds + 0.05) for part in after.taken] == pytest.approx(
            [1.5 * part * before.seconds for part in before.taken]
        )
        assert (before.core_wait_s, after.core_wait_s) == (0.0, 0.05)
        assert after.seconds == before.seconds


def test_processor_time_of_a_larger_message_grows_as_with_the_largest() -> None:
    """Not as between the last two sizes, one of which may have been disturbed."""
    given = calibration()
    plain = Network(Topology(CLUSTER))
    draft = given.collectives[0]
    cores = plain.hosts[0].bytes_per_s / plain.backend.host_bytes_per_s
    seconds = [cores * t.taken[0] * t.seconds for t in (plain.transfer(measured(draft, s, 4)) for s in SIZES)]
    disturbed = draft.model_copy(update={"processor_s": (*seconds[:2], 0.9 * seconds[3], seconds[3])})
    known = Network(Topology(CLUSTER), calibration=given.model_copy(update={"collectives": (disturbed,)}))
    call = collective_named("all_reduce", 64 << 20, 4)
    large, alone = known.transfer(call), plain.transfer(call)
    assert large.taken[0] * large.seconds == pytest.approx(alone.taken[0] * alone.seconds, rel=0.2)


def test_bytes_take_their_time_on_a_link_whatever_was_slow_where_it_was_measured() -> None:
    """Half of what the figures say may be true of what a processor held up; of what a link does only if links are as
    much faster."""
    call = measured(calibration().collectives[0], 16 << 20, 4)
    plain_s = Network(Topology(CLUSTER)).transfer(call).seconds
    quick = calibration(0.5)
    bounded_s = Network(Topology(CLUSTER), calibration=quick).transfer(call).seconds
    assert 0.9 * plain_s < bounded_s < plain_s
    declared = min(link.bandwidth_bytes_per_s for link in Topology(CLUSTER).path(0, 1))
    links = (LinkTimes(sender=0, receiver=1, bytes_per_s=2 * declared, latency_s=1e-5),)
    faster = quick.model_copy(update={"links": links})
    assert Network(Topology(CLUSTER), calibration=faster).transfer(call).seconds == pytest.approx(0.5 * plain_s)


@pytest.mark.parametrize("part_of_rate", [1.0, 0.5, 0.1])
def test_what_is_slow_over_fast_links_leaves_room_on_them(part_of_rate: float) -> None:
    """Not so on links that were found to be slow themselves; nor on processors."""
    call = measured(calibration().collectives[0], 16 << 20, 4)
    plain = Network(Topology(CLUSTER))
    alone = plain.transfer(call).loads
    declared = min(link.bandwidth_bytes_per_s for link in Topology(CLUSTER).path(0, 1))
    ways = [way for r in (1, 2, 3) for way in ((0, r), (r, 0))]
    links = tuple(LinkTimes(sender=a, receiver=b, bytes_per_s=part_of_rate * declared, latency_s=1e-5) for a, b in ways)
    known = calibration(2.0).model_copy(update={"links": links})
    loads = Network(Topology(CLUSTER), calibration=known).transfer(call).loads
    count = len(plain.links)
    filled = [min(1.0, load / 2 / part_of_rate) for load in alone[:count]]
    assert loads[:count] == pytest.approx(filled, rel=1e-6)
    assert loads[count:].tolist() == alone[count:].tolist()


def test_a_step_is_as_much_slower_as_its_collectives_and_its_devices() -> None:
    graph = training_graph()
    plan = build_plan("ddp", graph, CLUSTER, Context(4))
    assert plan.prediction is not None and plan.prediction.provenance == "guessed"
    slow = calibration(3.0)
    rates = DeviceRates(kind="cpu", flops_per_s={"float32": 1e9}, bytes_per_s=1e8, update_bytes_per_s=1e8, start_s=1e-3)
    network = build_plan("ddp", graph, CLUSTER, Context(4), cost_model=AnalyticCostModel(calibration=slow)).prediction
    all_of_it = slow.model_copy(update={"devices": (rates,)})
    both = build_plan("ddp", graph, CLUSTER, Context(4), cost_model=AnalyticCostModel(calibration=all_of_it)).prediction
    assert network is not None and both is not None
    assert network.exposed_communication_s > 2.5 * plan.prediction.exposed_communication_s
    assert network.compute_s == plan.prediction.compute_s < both.compute_s
    assert network.provenance == "guessed", "of its devices nothing was measured"
    assert both.provenance == "guessed", "what kernels reach of a device's rates is a guess"
    times = {node.name: 1e-3 for node in graph.compute}
    model = AnalyticCostModel(measured_s={"cpu": times}, calibration=all_of_it)
    timed = build_plan("ddp", graph, CLUSTER, Context(4), cost_model=model).prediction
    assert timed is not None and timed.provenance == "measured"
    assert timed.relative_error < both.relative_error


@pytest.mark.parametrize("ranks", [1, 4, 33, 64, 300])
def test_messages_have_a_number_for_each_pair_of_ranks(ranks: int) -> None:
    parts = [calibrating.part_elements(size, ranks) for size in calibrating.SIZES]
    assert parts == sorted(parts) and all(part > 0 and part % ranks == 0 for part in parts)
    assert parts[-1] == calibrating.SIZES[-1] // 4 // (ranks * ranks) * ranks


def test_a_processor_of_another_name_is_priced_as_a_processor() -> None:
    figures = "memory: 8 GiB, memory_bandwidth: 10 GB/s, peak_flops: 320 GFLOP/s"
    text = "{hosts: [{name: h, count: 2, devices: {kind: %s, %s}}], network: {bandwidth: 1 Gbit/s}}"
    named, other = (Topology(ClusterSpec.loads(text % (kind, figures))) for kind in ("cpu-epyc", "tensor-thing"))
    assert backend_of(named).name == "gloo" and is_cpu(named.ranks[0].device)
    assert backend_of(other).name == "nccl"


def test_a_processor_is_measured_on_a_machine_that_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gpus = ClusterSpec.loads("hosts: [{name: h, devices: 2 x T4}]")
    kinds = [_Bench(cluster, Group(0, 2), 1.0, print).device.type for cluster in (ClusterSpec.local(2), gpus)]
    assert kinds == ["cpu", "cuda"]
