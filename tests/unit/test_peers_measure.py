"""How a case is measured: groups that memory holds, failures, tuning; and what a suite consists of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar import ClusterSpec
from autopar.lab import this_machine
from benchmarks.interleaved import System
from benchmarks.peers import PEERS, Options, Peer, measure
from benchmarks.peers.case import Case, Effort
from benchmarks.peers.cases import FULL, QUICK
from benchmarks.peers.entrants import _tuned
from benchmarks.peers.fsdp import blocks
from benchmarks.peers.measure import Contest
from benchmarks.peers.outcome import COMPARED_STEPS, CaseOutcome
from benchmarks.peers.ranks import SystemFailed
from benchmarks.suite import WORKLOADS
from benchmarks.suite.clusters import CLUSTERS
from benchmarks.zoo.tiny import TINY

EFFORT = Effort(rounds=3, slow_rounds=1, rounds_s=60.0, block_s=1.0, block_steps=2, search_time_s=0.1, tune=True)
NAMES = ("ddp", "ddp_static_graph", "ddp_sparse", "ddp_fp16", "fsdp2")


class FakeRanks:
    """Two ranks whose systems take the step times that they are told to, and may fail."""

    def __init__(self, step_s: dict[str, float], failing: str = "") -> None:
        self.step_s, self.failing = step_s, failing
        self.alive: dict[str, Peer] = {}
        self.most_alive = 0
        self.runs: list[tuple[str, int, int]] = []

    def start(self) -> None:
        pass

    def build(self, key: str, peer: Peer, workload: str, options: Options) -> System:
        if peer.name == self.failing:
            self.alive.clear()
            raise SystemFailed(key, "it does not run here")
        self.alive[key] = peer
        self.most_alive = max(self.most_alive, len(self.alive))
        hosts = [this_machine()] * 2
        return System(key, hosts, lambda *steps: self._run(key, options, *steps), peer.period)

    def drop(self, key: str) -> None:
        del self.alive[key]

    def _run(self, key: str, options: Options, first: int, count: int, timeout_s: float) -> list[dict[str, Any]]:
        self.runs.append((key, first, count))
        name = self.alive[key].name
        step_s = self.step_s.get(f"{name} {options}", self.step_s.get(name, 1.0))
        losses = [2.0 - 0.01 * i for i in range(first, first + count)]
        return [{"times_s": [step_s] * count, "losses": losses}] * 2


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(TINY["tiny"], "local", ClusterSpec.local(2), tmp_path_factory.mktemp("plans"), search_time_s=0.1)


def _run(case: Case, ranks: FakeRanks, effort: Effort = EFFORT) -> CaseOutcome:
    return Contest(case, ranks, effort, lambda what: None).run(NAMES, "a lab", True)  # type: ignore[arg-type]


def _found(outcome: CaseOutcome) -> set[str]:
    return {e.name for e in outcome.entries}


def test_everybody_who_applies_takes_part_with_autopar_within_their_fidelities(case: Case) -> None:
    outcome = _run(case, FakeRanks({}))
    assert _found(outcome) == {*NAMES, "autopar", "autopar_rounded"}
    assert outcome.absent == {}


def test_the_fastest_choice_is_taken(case: Case) -> None:
    ranks = FakeRanks({"fsdp2 {'reshard_after_forward': False}": 0.7, "fsdp2 {'reshard_after_forward': True}": 0.5})
    (chosen,) = (e.system for e in _run(case, ranks).entries if e.name == "fsdp2")
    assert chosen.options == {"reshard_after_forward": True}
    assert set(chosen.step_s.values()) == {0.5}


def test_without_tuning_the_first_choice_is_taken(case: Case) -> None:
    ranks = FakeRanks({"fsdp2 {'reshard_after_forward': True}": 0.5})
    (taken,) = (e.system for e in _run(case, ranks, replace(EFFORT, tune=False)).entries if e.name == "fsdp2")
    assert taken.options == {"reshard_after_forward": False}
    assert "tuning" not in {key for key, _, _ in ranks.runs}


def test_a_full_memory_makes_groups_with_autopar_in_each(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = FakeRanks({})
    each, spare = 10 << 30, 45 << 30
    monkeypatch.setattr(measure, "available_bytes", lambda: spare - each * len(ranks.alive))
    outcome = _run(case, ranks)
    assert ranks.most_alive < 2 + len(NAMES)
    entries = {e.name: e.system for e in outcome.entries}
    assert set(entries) == {*NAMES, "autopar", "autopar_rounded"}
    for name in NAMES:
        assert entries[name].step_s.keys() <= entries["autopar"].step_s.keys()
    assert len(entries["autopar"].step_s) > EFFORT.rounds
    assert not ranks.alive


def test_who_fails_is_left_out_and_the_others_start_again(case: Case) -> None:
    ranks = FakeRanks({}, failing="ddp_sparse")
    outcome = _run(case, ranks)
    assert outcome.absent == {"ddp_sparse": "failed: it does not run here"}
    assert _found(outcome) == {*NAMES, "autopar", "autopar_rounded"} - {"ddp_sparse"}
    assert all(len(e.system.step_s) == EFFORT.rounds for e in outcome.entries)


def test_who_fails_in_every_choice_is_left_out(case: Case) -> None:
    assert set(_run(case, FakeRanks({}, failing="fsdp2")).absent) == {"fsdp2"}


def test_the_reference_takes_as_many_steps_as_the_others(case: Case) -> None:
    outcome = _run(case, FakeRanks({"ddp": 1.0, "ddp_sparse": 0.1}))
    steps = {e.name: len(e.system.losses) for e in outcome.entries}
    assert steps["ddp"] == max(steps.values()) <= COMPARED_STEPS
    assert {e.name: set(e.system.step_s.values()) for e in outcome.entries}["ddp_sparse"] == {0.1}


def test_the_slow_take_part_in_the_first_rounds_only(case: Case) -> None:
    outcome = _run(case, FakeRanks({"ddp_static_graph": 3.0}))
    rounds = {e.name: len(e.system.step_s) for e in outcome.entries}
    assert rounds["ddp_static_graph"] == EFFORT.slow_rounds < rounds["ddp"] == EFFORT.rounds


def test_systems_take_the_same_steps_from_the_first_on(case: Case) -> None:
    ranks = FakeRanks({})
    _run(case, ranks)
    for key in {key for key, _, _ in ranks.runs if key != "tuning"}:
        taken = [i for k, first, count in ranks.runs for i in range(first, first + count) if k == key]
        assert taken == list(range(len(taken)))


def test_suites_name_what_there_is() -> None:
    for suite in (QUICK, FULL):
        assert suite.chosen(()) == suite.cases
        assert {c for c, _ in suite.cases} <= CLUSTERS.keys()
        assert {w for _, ws in suite.cases for w in ws} <= WORKLOADS.keys()
        assert set(suite.peers) <= PEERS.keys()


def test_cases_can_be_named() -> None:
    assert QUICK.chosen(("bert/4x200m", "gpt2/4x200m")) == (("4x200m", ("bert", "gpt2")),)
    assert FULL.chosen(("bert",)) == (("4x1g", ("bert",)), ("2x2-1g", ("bert",)))
    assert FULL.chosen(("/4x200m",)) == (("4x200m", dict(FULL.cases)["4x200m"]),)


def test_the_full_suite_has_every_workload_on_two_clusters() -> None:
    assert Counter(w for _, ws in FULL.cases for w in ws) == dict.fromkeys(WORKLOADS, 2)


@pytest.mark.parametrize(("best_s", "taken"), [({}, True), ({"rounded": 1.0}, True), ({"exact": 1.0}, False)])
def test_who_is_far_behind_another_tries_no_further_choice(case: Case, best_s: dict[str, float], taken: bool) -> None:
    ranks = FakeRanks({"fsdp2": 8.0, "fsdp2 {'reshard_after_forward': False}": 9.0})
    chosen = _tuned(PEERS["fsdp2"], case, ranks, EFFORT, best_s, lambda what: None)  # type: ignore[arg-type]
    assert chosen == {"reshard_after_forward": taken}
    assert best_s["exact"] == {True: 8.0, False: 1.0}[taken]


@pytest.mark.parametrize("only", ["brt/4x1g", "bert/4x1", "brt", "bert/8x10g-virtual", "/2x100m"])
def test_a_case_that_is_not_there(only: str) -> None:
    with pytest.raises(KeyError, match=r"did you mean|virtual|has no case"):
        FULL.chosen((only,))


def test_blocks_are_the_entries_of_lists() -> None:
    model = TINY["tiny"].model()
    assert isinstance(model.blocks, nn.ModuleList)
    assert blocks(model) == list(model.blocks)


def test_blocks_without_lists_have_a_million_parameters() -> None:
    with torch.device("meta"):
        small, large, rest = nn.Linear(10, 10), nn.Linear(1000, 1001), nn.Sequential(nn.Linear(800, 800), nn.ReLU())
        pair = nn.Sequential(nn.Linear(800, 800), nn.Linear(800, 800))
    assert blocks(nn.Sequential(small, large, rest, pair)) == [large, pair]
