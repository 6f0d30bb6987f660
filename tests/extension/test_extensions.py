"""What is written outside of the package is planned for, priced, run and counted like what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import Pass, Passes
from autopar.cost_models.analytic import AnalyticCostModel
from autopar.cost_models.steps import predict_steps
from autopar.errors import PlanError, VerificationError
from autopar.ir.capture import JointGraph
from autopar.ir.passes import Capture
from autopar.ops.context import Context
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies import STRATEGIES, register
from autopar.strategies.lowering import lower_plan
from autopar.testing import check_strategy
from autopar.testing.cases import cluster_of
from tests.extension.fixed_latency import FIXED_S, TOY
from tests.extension.reciprocals import RECIPROCALS
from tests.extension.recursive_doubling import Doubling, RecursiveDoubling
from tests.extension.sign_compression import SignCompression
from tests.extension.signs import asked_later, loaded, saved
from tests.gloo.ranks import run_ranks
from tests.gloo.timing import every_fourth
from tests.tiers import sizes
from tests.unit.synthetic import MLP, cpu_hosts, training_graph


@pytest.fixture
def signs() -> Iterator[str]:
    register(SignCompression())
    yield SignCompression.name
    del STRATEGIES[SignCompression.name]


@pytest.fixture
def doubling() -> Iterator[str]:
    register(RecursiveDoubling())
    yield RecursiveDoubling.name
    del STRATEGIES[RecursiveDoubling.name]


def test_an_operation_of_ones_own_is_priced(doubling: str) -> None:
    """Twice the bytes of a ring at four ranks take the longer, where bandwidth decides; fewer rounds, where they do."""
    cluster, context = cpu_hosts(4), Context(4)
    for layers, quicker in ((MLP, "all_reduce"), ([("w", (4, 4))], doubling)):
        graph = training_graph(layers)
        members = tuple(ParameterSlice(name=name) for name, _ in layers)
        pricer = AnalyticCostModel().pricer(graph, Topology(cluster))
        times = {}
        for strategy in ("all_reduce", doubling):
            program = lower_plan([SyncGroup(strategy=strategy, members=members)], graph, context)
            times[strategy] = pricer.estimate(program).step_time_s
        assert min(times, key=times.__getitem__) == quicker


def test_an_operation_of_ones_own_runs_and_sends_what_it_declares(doubling: str) -> None:
    check_strategy(RecursiveDoubling, sizes(4, also=(1, 2))).raise_if_broken()


def test_what_signs_lose_is_kept_and_they_send_what_they_declare() -> None:
    check_strategy(SignCompression, sizes(2, also=(1, 4))).raise_if_broken()


def test_residuals_go_over_to_another_number_of_ranks(tmp_path: Path) -> None:
    before = run_ranks(2, saved, str(tmp_path))
    after = run_ranks(3, loaded, str(tmp_path))
    assert before[0] == before[1] and all(v > 0 for v in before[0].values())
    for found in after:
        assert found == pytest.approx(before[0], rel=1e-6)


def test_a_state_that_later_steps_ask_for_is_filled_from_a_folder_as_from_a_dict(tmp_path: Path) -> None:
    for found in run_ranks(2, asked_later, str(tmp_path)):
        assert found == {"folder": pytest.approx(0, abs=1e-6), "dict": pytest.approx(0, abs=1e-6)}


def test_signs_are_less_to_send_and_residuals_take_memory(signs: str) -> None:
    graph, context = training_graph(MLP), Context(4)
    members = tuple(ParameterSlice(name=name) for name, _ in MLP)
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    of = {
        name: pricer.estimate(lower_plan([SyncGroup(strategy=name, members=members)], graph, context))
        for name in ("all_reduce", signs)
    }
    elements = sum(p.spec.numel for p in graph.parameters)
    assert of[signs].sent_bytes[0] == pytest.approx(3 * elements / 8, rel=0.01)
    assert of[signs].peak_memory_bytes[0] - of["all_reduce"].peak_memory_bytes[0] >= 4 * elements


@pytest.mark.parametrize("strategy", ["all_reduce", "hierarchical_all_reduce", "summation_servers"])
def test_every_fourth_step_needs_no_file(strategy: str) -> None:
    """Four steps send what one does, and are priced at that."""
    graph, cluster = training_graph(MLP), cluster_of(4)
    topology, context = Topology(cluster), Context(4).on(cluster)
    members = tuple(ParameterSlice(name=name) for name, _ in MLP)
    options = {"inner": 2} if strategy == "hierarchical_all_reduce" else {}
    model, sent = AnalyticCostModel(), []
    for every in (1, 4):
        group = SyncGroup(strategy=strategy, members=members, options=options, every=every)
        sent.append(predict_steps(model, [group], graph, context, topology).sent_bytes[0])
    assert sent[0] == pytest.approx(4 * sent[1], rel=1e-3)


def test_every_fourth_step_averages() -> None:
    for rank, found in enumerate(run_ranks(4, every_fourth)):
        assert max(found.values()) < 1e-12, (rank, found)


def test_phases_that_no_library_knows_are_named(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubling, "phases", lambda op, call, links: [("doubling", links.along([]))])
    graph, spec = training_graph(MLP), SyncGroup(strategy=doubling, members=(ParameterSlice(name=MLP[0][0]),))
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    with pytest.raises(PlanError, match=r"the phases of 'doubling' name 'doubling'.*known: all_reduce"):
        pricer.estimate(lower_plan([spec], graph, Context(4)))


def test_a_file_that_is_run_twice_registers_one_strategy(doubling: str) -> None:
    again = type(RecursiveDoubling.__name__, (RecursiveDoubling,), {"__module__": RecursiveDoubling.__module__})
    register(again())
    other = type("Other", (RecursiveDoubling,), {})
    with pytest.raises(PlanError, match="there is a strategy 'recursive_doubling' already"):
        register(other())


def test_a_library_of_ones_own_is_planned_for_and_simulated() -> None:
    """Each of twelve collectives takes its fixed time, one after the other; one of all takes it once."""
    graph = training_graph(MLP, flops=1, bytes_moved=1)
    model, names = AnalyticCostModel(backend=TOY), [name for name, _ in MLP]
    times = []
    for groups in ([[name] for name in reversed(names)], [names]):
        specs = [
            SyncGroup(strategy="all_reduce", members=tuple(ParameterSlice(name=name) for name in some))
            for some in groups
        ]
        program = lower_plan(specs, graph, Context(4))
        times.append(model.predict(graph, program, Topology(cpu_hosts(4))).communication_s)
    assert times[0] - times[1] == pytest.approx((len(MLP) - 1) * FIXED_S, rel=0.2)


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (torch.sigmoid(self.layer(x)) / 4).sum()
        return found


def _program(*own: Pass) -> autopar.Program:
    model = Halved()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autopar.optimize(model, example_inputs=torch.ones(5, 3), optimizer=optimizer, passes=Passes(also=own))


def test_a_pass_of_ones_own_rewrites_the_step_and_is_compared_with_the_model() -> None:
    program = _program(RECIPROCALS)
    program.step(torch.ones(5, 3))
    code = program.graph_module.code
    assert "aten.mul" in code and "aten.div" not in code


def test_a_pass_that_changes_numbers_is_found() -> None:
    def harden(joint: JointGraph, capture: Capture) -> JointGraph:
        for node in joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
            node.target = torch.ops.aten.hardsigmoid.default
        return joint

    with pytest.raises(VerificationError, match="the loss"):
        _program(Pass("harden", "makes sigmoids hard", harden)).step(torch.ones(5, 3))
