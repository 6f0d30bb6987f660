"""The capture benchmark finds what is wrong: a differing step, an error, a dead process; and lists it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.job.process_group import Group
from benchmarks.capture.families import chosen, families, family_of
from benchmarks.capture.journal import Journal
from benchmarks.capture.outcome import Outcome, Run, merged
from benchmarks.capture.reference import Judge, train
from benchmarks.capture.table import report
from benchmarks.capture.trial import attempt, said
from benchmarks.zoo import Entry, find
from benchmarks.zoo.plain import ENTRIES as PLAIN

TIED = find(PLAIN, "tied-mlp")
ALONE = Group(0, 1)


class _InFloat32(nn.Module):
    """Computes in float32, whatever its parameters are in."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return (y.float() @ y.float().T @ y.float()).to(y.dtype)


class _Branches(_InFloat32):
    """On a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return -y if y.sum() > 0 else y


def _judge(entry: Entry) -> Judge:
    model = entry.build().double()
    return Judge(entry, model, 2, torch.float64, train(entry, model, 2, torch.float64))


@pytest.mark.parametrize("make", [TIED.make, _InFloat32])
def test_a_wrong_update_is_seen_and_rounding_is_not(make: Any) -> None:
    judge = _judge(replace(TIED, make=make))
    assert judge.worst(judge.expected) == (0.0, "")
    rounded = train(judge.entry, judge.model, 2, torch.float64, rounding=7)
    size, where = judge.worst(rounded)
    assert size > 1e-9 and where == ""
    for name, update in judge.expected.updates[1].items():
        wrong = [judge.expected.updates[0], {**judge.expected.updates[1], name: 1.001 * update}]
        size, where = judge.worst(replace(judge.expected, updates=wrong))
        assert size == pytest.approx(0.001) and where.startswith(f"step 1: the update of '{name}' is off by 1.0e-03")
    lost = [[losses[0] * 1.001, losses[1]] for losses in judge.expected.losses]
    assert "the loss is off by" in judge.worst(replace(judge.expected, losses=lost))[1]
    no_number = [{n: u * torch.nan for n, u in tree.items()} for tree in judge.expected.updates]
    assert judge.worst(replace(judge.expected, updates=no_number))[1]


def test_a_model_is_trained_in_both_modes_under_three_plans() -> None:
    outcome = attempt(TIED, ALONE)
    assert (outcome.kind, outcome.eager, outcome.failure, outcome.dtype) == ("equal", "", "", "float64")
    assert [(r.mode, r.plan) for r in outcome.runs] == [
        ("step", "searched"), ("step", "PartitionedPS"), ("step", "random"),
        ("module", "searched"), ("module", "PartitionedAR"), ("module", "random"),
    ]  # fmt: skip
    assert all(r.strategies and r.seconds > 0 for r in outcome.runs)


def test_what_cannot_be_captured_runs_eagerly_and_what_fails_is_the_models_fault() -> None:
    eager = attempt(replace(TIED, name="branches", make=_Branches), ALONE)
    assert eager.kind == "equal" and "a branch depends on" in eager.eager
    broken = attempt(replace(TIED, name="broken", make=lambda dropout: nn.Linear(3, 3)), ALONE)
    assert broken.kind == "unusable" and "mat1 and mat2 shapes" in broken.failure.splitlines()[0]
    assert said(ValueError("")) == "ValueError: no message"


def test_the_most_serious_of_all_ranks_and_runs_counts(tmp_path: Path) -> None:
    good = Run("step", "searched", "equal", error=1e-12)
    mine = Outcome("timm/a", 10, "float64", 1.0, (good, replace(good, mode="module")))
    theirs = replace(mine, runs=(replace(good, error=1e-11), Run("module", "searched", "wrong", "off")), seconds=2.0)
    both = merged([mine, theirs])
    assert (both.kind, both.said, both.seconds) == ("wrong", "module, searched: off", 2.0)
    assert both.runs[0].error == 1e-11
    assert merged([mine, Outcome("timm/a", failure="rank 1 ended")]).kind == "crashed"

    journal = Journal(tmp_path / "journal", "r1")
    journal.add(mine)
    journal.add(both)
    journal.path.write_text(journal.path.read_text() + '{"revision": "r1", "outco')
    assert journal.outcomes() == {"timm/a": both}
    assert Journal(journal.path, "r2").outcomes() == {}
    assert Journal(journal.path, "r2").outcomes(any_revision=True) == {"timm/a": both}

    eager = replace(mine, name="b", runs=(replace(good, eager="a branch"),))
    result = report([both, mine, eager, Outcome("c", failure="no", unusable=True)], {"timm": 2}, {"peft": "peft"})
    assert [r[0] for r in result.rows] == ["timm/a", "b", "c", "timm/a"]
    assert result.rows[1][-1] == "equal; eager: a branch"
    assert [t.met for t in result.targets] == [False, True, True, False, True]
    assert result.notes[0] == "timm: 2 models, 1 captured and equal, 0 eager and equal, 1 WRONG."


def test_models_are_named_by_themselves_and_by_family() -> None:
    assert [e.name for e in chosen(["bert"])] == ["bert"]
    names = [e.name for entries in families().values() for e in entries]
    assert len(set(names)) == len(names)
    assert all(family_of(e.name) == family for family, entries in families().items() for e in entries)
    with pytest.raises(KeyError, match="did you mean 'bert'"):
        chosen(["berd"])
