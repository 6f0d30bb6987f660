"""Compute as it is measured here: every node, no side effects, and what a plan predicts from it."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import ClusterSpec
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.runtime.compiled import Settings
from autopar.runtime.compiling.compute import Compiler
from autopar.runtime.operator_times import VARIABLE, OperatorTimes
from autopar.runtime.profile import known_seconds, node_seconds
from autopar.runtime.timing import Timing
from tests.unit.test_compute import one_by_one

CLUSTER = ClusterSpec.loads("hosts: [{name: host, count: 2, devices: 1 x cpu}]\nnetwork: {bandwidth: 1 Gbit/s}")


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of the user's cache."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 256))


BATCH = (torch.ones(64, 256), torch.zeros(64, 256))


def test_every_node_is_timed_and_nothing_is_changed() -> None:
    made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    graph = training_graph(made, flatten(BATCH), nn.functional.mse_loss)
    random = torch.get_rng_state()
    start = time.perf_counter()
    seconds = node_seconds(graph, made, flatten(BATCH), nn.functional.mse_loss)
    elapsed_s = time.perf_counter() - start
    assert set(seconds) == {n.name for n in graph.compute}
    assert torch.equal(torch.get_rng_state(), random), "what users draw does not depend on what is known already"
    assert 0 < sum(seconds.values()) < elapsed_s
    products = [n.name for n in graph.compute if n.op.startswith(("mm", "addmm"))]
    assert sum(seconds[n] for n in products) > 0.2 * sum(seconds.values()), "the work is in the matrix products"
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert all(p.grad is None for p in made.parameters())


class Shift(nn.Module):
    """Adds a buffer; as a loss, it is the mean square of what the output then differs by."""

    def __init__(self, by: torch.Tensor) -> None:
        super().__init__()
        self.by = nn.Buffer(by)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.by if target is None else (x + self.by - target).square().mean()


def test_buffers_that_modules_share_and_those_of_a_loss_are_found() -> None:
    """PEFT's VeRA has the same random matrices in every layer."""
    first, second, loss = (Shift(torch.ones(4)) for _ in range(3))
    second.by = first.by
    made = nn.Sequential(first, nn.Linear(4, 4), second)
    batch = flatten((torch.ones(3, 4), torch.zeros(3, 4)))
    graph = training_graph(made, batch, loss)
    assert graph.joint is not None and len([name for kind, name in graph.joint.inputs if kind == "buffer"]) >= 2
    assert set(node_seconds(graph, made, batch, loss)) == {n.name for n in graph.compute}


def test_an_operator_is_measured_once(nothing_known: Path) -> None:
    """A further model of the same operators is looked up, to the last digit; another shape is measured."""

    def measured(width: int) -> dict[str, float]:
        made = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
        batch = flatten((torch.ones(8, 64), torch.zeros(8, 64)))
        graph = training_graph(made, batch, nn.functional.mse_loss)
        return Timing(made, batch, Settings(nn.functional.mse_loss), None, lambda _: graph).seconds(graph)

    measured(32)
    (table,) = nothing_known.iterdir()
    kept = OperatorTimes.load(table)
    assert any(key.startswith("aten.addmm.default(float32[32], float32[8, 64]") for key in kept.seconds)
    assert measured(32) == measured(32)
    assert OperatorTimes.load(table) == kept
    measured(48)
    assert kept.seconds.items() < OperatorTimes.load(table).seconds.items()
    table.write_text("{")
    assert sum(measured(32).values()) > 0, "a table that cannot be read is measured anew"
    assert OperatorTimes.load(table).seconds.keys() == kept.seconds.keys()


def test_what_more_ranks_take_at_once_is_kept_apart(nothing_known: Path) -> None:
    made, batch = model(), flatten(BATCH)
    graph = training_graph(made, batch, nn.functional.mse_loss)
    met: list[str] = []
    found = node_seconds(
        graph, made, batch, nn.functional.mse_loss, ranks=3, meet=lambda: met.append("all ranks, before a pass")
    )
    assert len(met) == 18
    cpu = torch.device("cpu")
    assert known_seconds(graph, cpu) is None
    known = known_seconds(graph, cpu, 3)
    assert known is not None and known.keys() == found.keys()
    (table,) = nothing_known.iterdir()
    assert OperatorTimes.load(table).device.endswith(", 3 ranks at once")


def test_what_other_cores_take_is_kept_apart(nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of the same processor may share the folder, as may containers with few and with many of its cores."""
    cpu = torch.device("cpu")
    OperatorTimes.of(cpu).add({"mm": [1e-3]})
    assert OperatorTimes.of(cpu).seconds
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(1000), raising=False)
    assert not OperatorTimes.of(cpu).seconds and ", 1000 cores, " in OperatorTimes.of(cpu).device


def test_nothing_is_kept_where_nothing_says_which_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no name."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for variable in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    OperatorTimes.of(torch.device("cpu")).add({"mm": [1e-3]})
    assert not OperatorTimes.of(torch.device("cpu")).seconds


def test_ranks_that_share_no_machine_take_no_times_of_those_that_do(
    nothing_known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    OperatorTimes.of(cpu, 4).add({"mm": [1e-3]})
    assert OperatorTimes.of(cpu, 4).seconds
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not OperatorTimes.of(cpu, 4).seconds


def test_ranks_that_share_cores_take_longer_than_one_that_measures_alone() -> None:
    """By as much as the cluster's calibration says."""
    found = []
    for at_once in (None, 2.5):
        calibration = _of(CLUSTER).model_copy(update={"compute_at_once": at_once})
        plan = autopar.plan(
            model(),
            CLUSTER,
            example_inputs=torch.ones(1024, 256),
            mode="module",
            strategy="ddp",
            calibration=calibration,
            measure_compute=True,
        )
        assert plan.prediction is not None
        found.append(plan.prediction.compute_s)
    assert found[1] == pytest.approx(2.5 * found[0], rel=0.1), "all but the copies into buckets"


def test_compiled_regions_are_timed_as_a_whole(nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is looked at: each call takes one, an operator or a region."""
    ticks = itertools.count()
    monkeypatch.setattr("autopar.runtime.profile.Clock.now", lambda self: float(next(ticks)))
    made = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 8))
    batch = flatten((torch.randn(4, 8), torch.zeros(4, 8)))
    graph = training_graph(made, batch, nn.functional.mse_loss)
    alone = node_seconds(graph, made, batch, nn.functional.mse_loss)
    (table,) = nothing_known.iterdir()
    before = table.read_text()
    for _ in range(2):
        compiler = Compiler(one_by_one)
        compiled = node_seconds(graph, made, batch, nn.functional.mse_loss, compiler)
        assert compiler.regions == 1 and set(compiled) == set(alone)
        assert sum(compiled.values()) == pytest.approx(1.0), "the pass as a whole"
        ratios = [compiled[n] / alone[n] for n in alone if compiled[n]]
        assert len(ratios) > len(alone) / 2
        assert max(ratios) == pytest.approx(min(ratios)), "shared out as operators take alone"
    assert table.read_text() == before, "what is known already is kept"


def test_a_plan_may_rest_on_it() -> None:
    """The devices are said to be many thousand times slower than any is, which the measured plan does not believe."""
    text = "{hosts: [{name: h, count: 2, devices: {kind: cpu, peak_flops: 1 MFLOP/s}}], network: {bandwidth: 1 Gbit/s}}"
    slow = ClusterSpec.loads(text)
    told, found = (
        autopar.plan(
            model(),
            slow,
            example_inputs=BATCH,
            loss_fn=nn.functional.mse_loss,
            strategy="ddp",
            measure_compute=measure,
        ).prediction
        for measure in (False, True)
    )
    assert told is not None and found is not None
    assert told.compute_s > 20 * found.compute_s
    assert found.wire_bytes == told.wire_bytes
    with pytest.raises(autopar.AutoparError, match="another cluster"):
        autopar.plan(
            model(),
            CLUSTER,
            example_inputs=BATCH,
            loss_fn=nn.functional.mse_loss,
            calibration=_of(slow),
            strategy="ddp",
        )


def _of(cluster: ClusterSpec) -> autopar.Calibration:
    return autopar.Calibration(
        date="2026-11-21", hardware="none", versions={}, cluster=cluster.fingerprint, backend="gloo"
    )
