"""Compute time, optimizer updates and copies on one device."""

from __future__ import annotations

import pytest

from autopar.cost_models import ADAMW, AnalyticCostModel, optimizer_cost
from autopar.cost_models.compute import FLOPS_FRACTION, MEMORY_FRACTION, Rates, node_times
from autopar.ops.values import Work
from autopar.search.builders import builder_named
from autopar.spec.calibration import DeviceRates
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph

RATES = Rates(flops_per_s=1e9, bytes_per_s=1e8, start_s=1e-3, update_bytes_per_s=1e8)


def test_a_node_takes_the_longer_of_arithmetic_and_memory() -> None:
    assert RATES.seconds(Work(2e9, 1e8, kernels=1)) == pytest.approx(2.001)
    assert RATES.seconds(Work(1e9, 3e8, kernels=1)) == pytest.approx(3.001)


def test_rates_are_fractions_of_the_peaks() -> None:
    device = cpu_hosts(1, devices="1 x A100-80GB").ranks[0].device
    rates = Rates.of(device, "bfloat16")
    assert rates.flops_per_s == pytest.approx(FLOPS_FRACTION * 312e12)
    assert rates.bytes_per_s == pytest.approx(MEMORY_FRACTION * 2039e9)


def test_updates_go_at_the_rate_that_was_measured_of_the_optimizer_on_its_kind_of_device() -> None:
    device = cpu_hosts(1).ranks[0].device
    optimizer = optimizer_cost("AdamW").measured(device.kind, 1e-9)
    assert optimizer.measured("cpu", None) is optimizer
    assert dict(optimizer.rates) == {device.kind: pytest.approx(7e9)}
    assert Rates.of(device, "float32", None, 7e9).update_bytes_per_s == 7e9
    known = DeviceRates(kind="cpu", flops_per_s={}, bytes_per_s=3e9, start_s=1e-6, update_bytes_per_s=2e9)
    assert Rates.of(device, "float32", known).update_bytes_per_s == 2e9
    assert Rates.of(device, "float32", known, 7e9).update_bytes_per_s == 7e9
    graph, topology = training_graph(), Topology(cpu_hosts(1))
    program = lower_plan(builder_named("ddp")(graph.parameters, Context(1), cpu_hosts(1)), graph, Context(1))
    slow, fast = (
        AnalyticCostModel(optimizer_cost("AdamW").measured(kind, 1e-9)).predict(graph, program, topology).step_time_s
        for kind in ("another", device.kind)
    )
    assert slow - fast == pytest.approx(
        graph.parameter_bytes * 7 * (1 / Rates.of(device, "float32").update_bytes_per_s - 1 / 7e9), rel=1e-3
    )


def test_node_times_take_measured_times_first_and_views_for_free() -> None:
    graph = training_graph([("w", (4, 4))], flops=10**9, bytes_moved=0)
    assert node_times(graph, RATES) == pytest.approx([1.001, 1.001, 1.001])
    assert node_times(graph, RATES, {"n1": 7.0}) == pytest.approx([1.001, 7, 1.001])
    views = training_graph([("w", (4, 4))], flops=0, bytes_moved=0)
    assert node_times(views, RATES) == [0, 0, 0]


def test_figures_say_where_they_come_from() -> None:
    graph = training_graph()
    topology = Topology(cpu_hosts(1))
    program = lower_plan([all_reduce(graph.parameters[0].name)], graph, Context(1))
    guessed = AnalyticCostModel().predict(graph, program, topology)
    assert guessed.provenance == "guessed"
    times = {"cpu": {n.name: 0.5 for n in graph.compute}}
    measured = AnalyticCostModel(measured_s=times).predict(graph, program, topology)
    assert measured.provenance == "measured"
    assert measured.relative_error < guessed.relative_error
    assert measured.compute_s == pytest.approx(0.5 * len(graph.compute), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "settings", "state"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("AdamW", {}, 2),
        ("Adam", {"amsgrad": True}, 3),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 3),
        ("SomethingNew", {}, 2),
    ],
)
def test_optimizers_keep_state(name: str, settings: dict[str, object], state: int) -> None:
    assert optimizer_cost(name, settings).state_tensors == state


def test_adamw_moves_seven_tensors() -> None:
    assert ADAMW.moved_tensors == 7


def all_reduce(*names: str) -> SyncGroup:
    return SyncGroup(strategy="all_reduce", members=tuple(ParameterSlice(name=n) for n in names))


def update_s(strategy: str, rank: int, options: dict[str, int] | None = None) -> float:
    """Seconds that a rank's device spends on the update of one large parameter."""
    graph = training_graph([("w", (4096, 4096))])
    group = SyncGroup(strategy=strategy, members=(ParameterSlice(name="w"),), options=dict(options or {}))
    program = lower_plan([group], graph, Context(4))
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    update = next(c for c in program.calls if c.op.updates)
    return float(pricer.price(update).device_s[rank])


def test_a_rank_updates_what_it_holds() -> None:
    everything = update_s("all_reduce", 0)
    assert update_s("partitioned_parameter_server", 3) == pytest.approx(everything / 4, rel=0.01)
    assert update_s("parameter_server", 1, {"owner": 1}) == pytest.approx(everything, rel=0.01)
    assert update_s("parameter_server", 0, {"owner": 1}) == 0


def test_one_pricer_tells_gradients_that_are_cast_from_those_that_are_not() -> None:
    """On the wire both are bfloat16; only one is so in memory."""
    graph = training_graph([("a", (1024, 1024)), ("b", (1024, 1024))], dtypes=["bfloat16", "float32"])
    groups = [
        SyncGroup(strategy="all_reduce", members=(ParameterSlice(name=name),), options={"wire": "bfloat16"})
        for name in ("b", "a")
    ]
    program = lower_plan(groups, graph, Context(4))
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    cast, as_it_is = (pricer.price(c).device_s[0] for c in program.calls if c.op.takes_gradients)
    assert cast > as_it_is == 0
