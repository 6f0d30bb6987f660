"""The corrected cost model: a factor on the simulation, an interval, and what a cluster's own steps teach it."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models import AnalyticCostModel, CorrectedCostModel, Observation, cost_model_for
from autopar.cost_models.corrected import SHIPPED, UNCORRECTED, shipped
from autopar.cost_models.correction import Correction
from autopar.cost_models.features import features
from autopar.cost_models.learning import learn
from autopar.cost_models.own_trials import OwnTrials
from autopar.errors import PlanError
from autopar.search.builders import builder_named, names
from autopar.spec.calibration import Calibration
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from tests.unit.synthetic import cpu_hosts, training_graph
from tests.unit.test_calibration import CLUSTER, calibration

GRAPH = training_graph()
TOPOLOGY = Topology(CLUSTER)


def programs() -> list[StepProgram]:
    """One of each builder that differs from the others, and can be used here."""
    context = Context(4).on(CLUSTER)
    plans = [builder_named(n)(GRAPH.parameters, context, CLUSTER) for n in names(rounded=True, late=False)]
    lowered = []
    for groups in {str(groups): groups for groups in plans}.values():
        with contextlib.suppress(PlanError):
            lowered.append(lower_plan(groups, GRAPH, context))
    return lowered


def slow_with_servers(program: StepProgram, predicted_s: float) -> float:
    """A cluster whose broadcasts take a quarter longer than anyone thought."""
    pricer = AnalyticCostModel().pricer(GRAPH, TOPOLOGY)
    share = features(program, pricer.estimate(program), pricer)["broadcast time"]
    return predicted_s * (1.25 if share > 0.1 else 1.0)


@pytest.fixture(scope="module")
def correction() -> Correction:
    """Learned where predictions are off by a tenth, whatever the plan."""
    model, draw = AnalyticCostModel(), np.random.default_rng(0)
    pricer = model.pricer(GRAPH, TOPOLOGY)
    estimates = [(p, pricer.estimate(p)) for p in programs()]
    found = [features(p, e, pricer) for p, e in estimates]
    rows = np.array([list(f.values()) for f in found])
    predicted = np.array([e.step_time_s for _, e in estimates])
    measured = 1.1 * predicted * np.exp(draw.normal(0, 0.01, len(predicted)))
    return learn(tuple(found[0]), rows, predicted, measured, [i % 5 for i in range(len(rows))])


def test_the_step_is_longer_by_the_factor_and_compute_is_not(correction: Correction) -> None:
    plain, model = AnalyticCostModel(), CorrectedCostModel(AnalyticCostModel(), correction)
    for program in programs()[:5]:
        before = plain.predict(GRAPH, program, TOPOLOGY, timeline=True)
        after = model.predict(GRAPH, program, TOPOLOGY, timeline=True)
        assert after.step_time_s == pytest.approx(1.1 * before.step_time_s, rel=0.03)
        assert after.compute_s == before.compute_s
        assert after.compute_s + after.exposed_communication_s == pytest.approx(after.step_time_s)
        assert max(s.stop_s for s in after.spans) <= 1.001 * after.step_time_s
        assert after.sent_bytes == before.sent_bytes


def test_own_steps_tell_one_kind_of_plan_from_another(correction: Correction) -> None:
    every = programs()
    model = CorrectedCostModel(AnalyticCostModel(), correction)
    before = {id(p): model.predict(GRAPH, p, TOPOLOGY).step_time_s for p in every}
    off_before, off_after = [], []
    for draw in range(5):
        mixed = random.Random(draw).sample(every, len(every))
        seen, others = mixed[: len(every) // 2], mixed[len(every) // 2 :]
        observed = [Observation(GRAPH, p, TOPOLOGY, slow_with_servers(p, before[id(p)])) for p in seen]
        assert model.fit(observed) is model
        for program in others:
            truth = slow_with_servers(program, before[id(program)])
            off_before.append(abs(before[id(program)] / truth - 1))
            off_after.append(abs(model.predict(GRAPH, program, TOPOLOGY).step_time_s / truth - 1))
    assert max(off_before) > 0.15
    assert np.mean(off_after) < 0.7 * np.mean(off_before)
    model.fit([])
    assert model.predict(GRAPH, every[0], TOPOLOGY).step_time_s == before[id(every[0])]


def test_the_most_telling_plans_are_of_different_kinds(correction: Correction) -> None:
    """Two of one plan tell no more than one of them, beside the noise; and what is left is known better than after as
    many others."""
    every = programs()
    model = CorrectedCostModel(AnalyticCostModel(), correction)
    chosen = model.most_telling(GRAPH, [*every, *every], TOPOLOGY, 6)
    assert len({i % len(every) for i in chosen}) == 6
    assert sorted(model.most_telling(GRAPH, every[:3], TOPOLOGY, 6)) == [0, 1, 2]
    pricer = model.pricer(GRAPH, TOPOLOGY)
    rows = np.array([model._row(p, pricer, pricer.estimate(p)) for p in every])

    def unknown(at: list[int]) -> float:
        return float(OwnTrials.of(correction, rows[at], np.zeros(len(at))).residual(rows)[1].mean())

    first = model.most_telling(GRAPH, every, TOPOLOGY, 6)
    drawn = [unknown(random.Random(i).sample(range(len(every)), 6)) for i in range(10)]
    assert unknown(first) < min(drawn)


def test_alike_plans_are_off_alike_and_all_of_them_by_less_once_they_are_measured(correction: Correction) -> None:
    every = programs()
    model = CorrectedCostModel(AnalyticCostModel(), correction)
    before = model.apart(GRAPH, [every[0], *every], TOPOLOGY)
    assert before[:2] == [0.0, 0.0] and max(before) > 0.01
    taken_s = [model.predict(GRAPH, p, TOPOLOGY).step_time_s for p in every]
    model.fit([Observation(GRAPH, p, TOPOLOGY, s) for p, s in zip(every, taken_s, strict=True)])
    after = model.apart(GRAPH, [every[0], *every], TOPOLOGY)
    assert all(a <= b for a, b in zip(after, before, strict=True)) and max(after) < 0.7 * max(before)
    plain = cost_model_for(trials=lambda basis: [])
    assert isinstance(plain, CorrectedCostModel)
    assert max(plain.apart(GRAPH, every, TOPOLOGY)) > 2 * max(before), "data sheets are further off"


def test_where_compute_takes_longer_plans_that_wait_for_the_network_are_off_by_less() -> None:
    """Two trials, of the plan that computes for the largest part of its step and of the one that waits most, say it of
    those between them."""
    every, pricer = programs(), AnalyticCostModel().pricer(GRAPH, TOPOLOGY)
    estimates = [pricer.estimate(p) for p in every]
    shares = [features(p, e, pricer)["compute"] for p, e in zip(every, estimates, strict=True)]
    took_s = [e.step_time_s * math.exp(2 * share) for e, share in zip(estimates, shares, strict=True)]
    seen = [
        Observation(GRAPH, every[i], TOPOLOGY, took_s[i])
        for i in (shares.index(max(shares)), shares.index(min(shares)))
    ]

    def off(along_compute: float) -> float:
        model = cost_model_for(trials=lambda basis: [])
        assert isinstance(model, CorrectedCostModel)
        model.prior = replace(UNCORRECTED, along_compute=along_compute)
        model.fit(seen)
        said_s = [model.predict(GRAPH, p, TOPOLOGY).step_time_s for p in every]
        return float(np.mean([abs(math.log(s / t)) for s, t in zip(said_s, took_s, strict=True)]))

    assert max(shares) - min(shares) > 0.1
    assert off(UNCORRECTED.along_compute) < 0.6 * off(math.inf)


@pytest.mark.parametrize("kinds_differ", [False, True])
def test_few_trials_say_whether_data_sheets_are_off_by_one_factor(kinds_differ: bool) -> None:
    every = programs()
    model = cost_model_for(trials=lambda basis: [])
    assert isinstance(model, CorrectedCostModel)
    said_s = [model.predict(GRAPH, p, TOPOLOGY).step_time_s for p in every]
    before = model.apart(GRAPH, every, TOPOLOGY)
    draw = random.Random(0)
    off = [3.0 * (math.exp(draw.gauss(0, 0.4)) if kinds_differ else 1.0) for _ in range(5)]
    model.fit([Observation(GRAPH, p, TOPOLOGY, o * s) for p, s, o in zip(every, said_s, off, strict=False)])
    after = model.apart(GRAPH, every, TOPOLOGY)
    assert (np.mean(after) > 0.6 * np.mean(before)) == kinds_differ


def test_a_disturbed_step_counts_for_less(correction: Correction) -> None:
    program = programs()[0]
    model = CorrectedCostModel(AnalyticCostModel(), correction)
    before = model.predict(GRAPH, program, TOPOLOGY).step_time_s
    after = [
        model.fit([Observation(GRAPH, program, TOPOLOGY, 1.2 * before, disturbed)]).predict(GRAPH, program, TOPOLOGY)
        for disturbed in (True, False)
    ]
    assert before < after[0].step_time_s < after[1].step_time_s < 1.2 * before


def test_only_measured_figures_have_the_learned_interval(correction: Correction) -> None:
    program = programs()[0]
    guessed = CorrectedCostModel(AnalyticCostModel(), correction).predict(GRAPH, program, TOPOLOGY)
    assert guessed.provenance != "measured"
    assert guessed.relative_error == AnalyticCostModel().predict(GRAPH, program, TOPOLOGY).relative_error
    nodes = {TOPOLOGY.ranks[0].device.kind: {n.name: 1e-3 for n in GRAPH.compute}}
    known = CorrectedCostModel(AnalyticCostModel(measured_s=nodes, calibration=calibration()), correction)
    estimate = known.predict(GRAPH, program, TOPOLOGY)
    assert estimate.provenance == "measured"
    assert np.expm1(correction.inside) * 0.9 <= estimate.relative_error <= np.expm1(correction.outside) * 1.1


def test_the_correction_is_taken_where_a_cluster_with_gloo_was_calibrated() -> None:
    assert isinstance(cost_model_for(), AnalyticCostModel)
    assert isinstance(cost_model_for(calibration=calibration()), CorrectedCostModel)
    for backend in ("cpu:gloo,cuda:nccl", "none"):
        other = Calibration.model_validate(calibration().model_dump() | {"backend": backend})
        assert isinstance(cost_model_for(calibration=other), AnalyticCostModel)


def test_what_is_shipped_fits_the_features_that_are_computed() -> None:
    pricer = AnalyticCostModel().pricer(GRAPH, TOPOLOGY)
    program = programs()[0]
    assert set(shipped().features) == set(features(program, pricer.estimate(program), pricer))
    assert SHIPPED.with_name("README.md").exists()


def test_on_a_cluster_unlike_the_labs_it_changes_little() -> None:
    """A network a hundred times faster than any that was learned from."""
    cluster = cpu_hosts(4, "400 Gbit/s")
    context = Context(4).on(cluster)
    program = lower_plan(builder_named("ddp")(GRAPH.parameters, context, cluster), GRAPH, context)
    plain = AnalyticCostModel().predict(GRAPH, program, Topology(cluster)).step_time_s
    assert CorrectedCostModel(AnalyticCostModel()).predict(GRAPH, program, Topology(cluster)).step_time_s == (
        pytest.approx(plain, rel=0.02)
    )
